"""Adds the system options to every task, with or without a dataclass: flags, hydra keys, configuration."""

import dataclasses
import inspect
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from hydra.core.config_store import ConfigStore

from fairseq_tutel.plugin.registration.flags import SystemOptions


class _AddArgs(classmethod):
    """`add_args` of a task without a dataclass: its own flags, then those of the system options."""

    def __init__(self, stock: Any) -> None:
        def add_args(cls: type, parser: Any) -> None:
            stock.__get__(None, cls)(parser)
            gen_parser_from_dataclass(parser, SystemOptions())

        super().__init__(add_args)


def give_system_options() -> None:
    """Add them to every registered task without them; call it again after a user's tasks are registered."""
    for name, task in TASK_REGISTRY.items():
        stock = TASK_DATACLASS_REGISTRY.get(name)
        add_args = inspect.getattr_static(task, "add_args")
        if stock is None and not isinstance(add_args, _AddArgs):
            task.add_args = _AddArgs(add_args)
        elif stock is not None and not issubclass(stock, SystemOptions):
            bases = (SystemOptions, stock)
            _register(name, task, dataclasses.make_dataclass(stock.__name__, [], bases=bases))


def _register(name: str, task: Any, dataclass: Any) -> None:
    """Repeat what fairseq's `register_task` did, with another dataclass."""
    TASK_DATACLASS_REGISTRY[name] = task.__dataclass = dataclass
    node = dataclass()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")
