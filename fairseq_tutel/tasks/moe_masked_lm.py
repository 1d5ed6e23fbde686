"""moe_masked_lm: fairseq's masked_lm with the system options."""

from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from fairseq_tutel.plugin.task import MoETaskMixin


@register_task("moe_masked_lm", dataclass=MaskedLMConfig)
class MoEMaskedLMTask(MoETaskMixin, MaskedLMTask):
    """Masked language modeling; the system options say how experts are computed."""
