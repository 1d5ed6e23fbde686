"""MoE variants of fairseq's classes, and objects of fairseq that get another class."""

import sys
from typing import Any

# Every assignment to an object's __class__ goes through `change_class`. It is the last resort where fairseq
# itself constructs the object:
#
# object                  | new class                    | where                   | why a task
# | MoETaskMixin before its own  | training/task.py        | --task may name a stock task EpochBatchIterator
# | ElasticEpochBatchIterator    | training/task.py        | a task's method creates it a model
# | its MoE variant              | models/variants.py      | build_model may name its own class
# MMapIndexedDataset      | torch's Dataset              | registration/stock_errors.py | its __del__ fails
# half-built
#
# Likewise attributes of parameters, which fairseq copies to new objects or whose optimizer it rebuilds:
#
# param_group             | ranks/groups.py: the Slice that this rank holds; fairseq copies it to fp32
# masters zero_hook               | zero/reduce.py: the gradient hook of the latest optimizer


def change_class(instance: Any, cls: type) -> None:
    """Give an object that fairseq constructed another class; see the table above."""
    instance.__class__ = cls


def variant_of(stock: type, *before: type, module: str, **attributes: Any) -> type:
    """Return the MoE variant of a fairseq class, named MoE plus its name."""
    name = f"MoE{stock.__name__}"
    namespace = {"__doc__": stock.__doc__, "__module__": module, **attributes}
    variant = type(name, (*before, stock), namespace)
    setattr(sys.modules[module], name, variant)
    return variant
