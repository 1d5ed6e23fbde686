"""Every task has the system options, with or without a dataclass: flags, hydra keys, configuration."""

import dataclasses
import inspect
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from hydra.core.config_store import ConfigStore

from fairseq_tutel.plugin.registration.flags import SystemOptions

_without_dataclass: set[type] = set()


def give_system_options() -> None:
    """Give them to every registered task that lacks them; a user's may come later, so call it again."""
    for name, task in TASK_REGISTRY.items():
        stock = TASK_DATACLASS_REGISTRY.get(name)
        if stock is None and task not in _without_dataclass:
            _without_dataclass.add(task)
            task.add_args = _with_flags(inspect.getattr_static(task, "add_args"))
        elif stock is not None and not issubclass(stock, SystemOptions):
            bases = (SystemOptions, stock)
            _register(name, task, dataclasses.make_dataclass(stock.__name__, [], bases=bases))


def _with_flags(stock: Any) -> Any:
    def add_args(cls: type, parser: Any) -> None:
        stock.__get__(None, cls)(parser)
        gen_parser_from_dataclass(parser, SystemOptions())

    return classmethod(add_args)


def _register(name: str, task: Any, dataclass: Any) -> None:
    """Do what fairseq's `register_task` did, with another dataclass."""
    TASK_DATACLASS_REGISTRY[name] = task.__dataclass = dataclass
    node = dataclass()
    node._name = name
    ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")
