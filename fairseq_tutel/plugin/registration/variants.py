"""Makes MoE variants of fairseq's classes, and adds `SystemOptions` to every fairseq task."""

import dataclasses
import inspect
import sys
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from hydra.core.config_store import ConfigStore

from fairseq_tutel.plugin.registration.flags import SystemOptions


def change_class(instance: Any, cls: type) -> None:
    """Change the class of an object that fairseq constructed."""
    instance.__class__ = cls


def variant_of(stock: type, *before: type, module: str, **attributes: Any) -> type:
    """Make the MoE variant of a fairseq class; the variant's name has the prefix MoE."""
    name = f"MoE{stock.__name__}"
    variant = type(name, (*before, stock), {"__doc__": stock.__doc__, "__module__": module, **attributes})
    setattr(sys.modules[module], name, variant)
    return variant


class _AddArgs(classmethod):
    """Replaces `add_args` of a task without a dataclass: adds the task's flags and `SystemOptions`."""

    def __init__(self, stock: Any) -> None:
        def add_args(cls: type, parser: Any) -> None:
            stock.__get__(None, cls)(parser)
            gen_parser_from_dataclass(parser, SystemOptions())

        super().__init__(add_args)


def give_system_options() -> None:
    """Add `SystemOptions` to every registered task that lacks these options.

    If a user's tasks are registered later, give_system_options() must be called again.
    """
    for name, task in TASK_REGISTRY.items():
        stock = TASK_DATACLASS_REGISTRY.get(name)
        add_args = inspect.getattr_static(task, "add_args")
        if stock is None and not isinstance(add_args, _AddArgs):
            task.add_args = _AddArgs(add_args)
        elif stock is not None and not issubclass(stock, SystemOptions):
            # Register the task again with the extended dataclass, as fairseq's `register_task` does.
            dataclass = dataclasses.make_dataclass(stock.__name__, [], bases=(SystemOptions, stock))
            TASK_DATACLASS_REGISTRY[name] = task.__dataclass = dataclass
            node = dataclass()
            node._name = name
            ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")
