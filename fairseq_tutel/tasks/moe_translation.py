"""moe_translation: fairseq's translation with the system options."""

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_tutel.plugin.task import MoETaskMixin


@register_task("moe_translation", dataclass=TranslationConfig)
class MoETranslationTask(MoETaskMixin, TranslationTask):
    """Translation; the system options say how experts are computed."""
