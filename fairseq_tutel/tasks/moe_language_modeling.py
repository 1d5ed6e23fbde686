"""moe_language_modeling: fairseq's language_modeling with the system options."""

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_tutel.plugin.task import MoETaskMixin


@register_task("moe_language_modeling", dataclass=LanguageModelingConfig)
class MoELanguageModelingTask(MoETaskMixin, LanguageModelingTask):
    """Language modeling; the system options say how experts are computed."""
