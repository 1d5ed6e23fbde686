"""moe_denoising: fairseq's denoising with the system options."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.denoising import DenoisingConfig, DenoisingTask

from fairseq_tutel.flags import SystemOptions
from fairseq_tutel.task_mixin import MoETaskMixin


@dataclass
class MoEDenoisingConfig(SystemOptions, DenoisingConfig):  # type: ignore[valid-type,misc]
    """The stock task's options and the system options."""


@register_task("moe_denoising", dataclass=MoEDenoisingConfig)
class MoEDenoisingTask(MoETaskMixin, DenoisingTask):
    """Denoising; the system options say how experts are computed."""
