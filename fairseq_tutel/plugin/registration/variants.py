"""MoE variants of fairseq's classes, and objects of fairseq that get another class."""

import sys
from typing import Any


def change_class(instance: Any, cls: type) -> None:
    """Give an object that fairseq constructed another class; `wrapped.CHANGED` lists them."""
    instance.__class__ = cls


def variant_of(stock: type, *before: type, module: str, **attributes: Any) -> type:
    """Return the MoE variant of a fairseq class, named MoE plus its name."""
    name = f"MoE{stock.__name__}"
    namespace = {"__doc__": stock.__doc__, "__module__": module, **attributes}
    variant = type(name, (*before, stock), namespace)
    setattr(sys.modules[module], name, variant)
    return variant
