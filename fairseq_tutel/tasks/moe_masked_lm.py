"""moe_masked_lm: fairseq's masked_lm with the system options."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from fairseq_tutel.flags import SystemOptions
from fairseq_tutel.task_mixin import MoETaskMixin


@dataclass
class MoEMaskedLMConfig(SystemOptions, MaskedLMConfig):  # type: ignore[valid-type,misc]
    """The stock task's options and the system options."""


@register_task("moe_masked_lm", dataclass=MoEMaskedLMConfig)
class MoEMaskedLMTask(MoETaskMixin, MaskedLMTask):
    """Masked language modeling; the system options say how experts are computed."""
