"""Registers a moe_ variant of every fairseq task, and adds `SystemOptions` to all tasks.

A user's task that is registered later has no variant. It gets MoETaskMixin when its model is built.
"""

import inspect

from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, register_task

from fairseq_tutel.plugin.registration.variants import give_system_options, variant_of
from fairseq_tutel.plugin.training.task import MoETaskMixin
from fairseq_tutel.tasks import image_classification  # noqa: F401 - registered before its variant


def _register_variants() -> None:
    for name, stock in list(TASK_REGISTRY.items()):
        if issubclass(stock, MoETaskMixin) or f"moe_{name}" in TASK_REGISTRY:
            continue
        # The variant gets a copy, because give_system_options later replaces the stock task's add_args.
        add_args = inspect.getattr_static(stock, "add_args")
        variant = variant_of(stock, MoETaskMixin, module=__name__, add_args=add_args)
        register_task(f"moe_{name}", dataclass=TASK_DATACLASS_REGISTRY.get(name))(variant)


_register_variants()
give_system_options()
