"""moe_denoising: fairseq's denoising with the system options."""

from fairseq.tasks import register_task
from fairseq.tasks.denoising import DenoisingConfig, DenoisingTask

from fairseq_tutel.plugin.task import MoETaskMixin


@register_task("moe_denoising", dataclass=DenoisingConfig)
class MoEDenoisingTask(MoETaskMixin, DenoisingTask):
    """Denoising; the system options say how experts are computed."""
