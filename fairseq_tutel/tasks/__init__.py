"""A moe_ twin of every stock task; like every other task they have the system options.

A user's own task, which may be registered later, needs none: the mixin is attached to it.
"""

import inspect

from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, register_task

from fairseq_tutel.plugin import twin_of
from fairseq_tutel.plugin.registration.task_options import give_system_options
from fairseq_tutel.plugin.training.task import MoETaskMixin
from fairseq_tutel.tasks import image_classification  # noqa: F401 - registered before its twin is made


def _register_twins() -> None:
    for name, stock in list(TASK_REGISTRY.items()):
        if issubclass(stock, MoETaskMixin) or f"moe_{name}" in TASK_REGISTRY:
            continue
        # Of its own: the stock one will be given the system options, too.
        add_args = inspect.getattr_static(stock, "add_args")
        twin = twin_of(stock, MoETaskMixin, module=__name__, add_args=add_args)
        register_task(f"moe_{name}", dataclass=TASK_DATACLASS_REGISTRY.get(name))(twin)


_register_twins()
give_system_options()
