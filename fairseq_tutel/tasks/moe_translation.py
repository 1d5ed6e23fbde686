"""moe_translation: fairseq's translation with the system options."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_tutel.flags import SystemOptions
from fairseq_tutel.task_mixin import MoETaskMixin


@dataclass
class MoETranslationConfig(SystemOptions, TranslationConfig):  # type: ignore[valid-type,misc]
    """The stock task's options and the system options."""


@register_task("moe_translation", dataclass=MoETranslationConfig)
class MoETranslationTask(MoETaskMixin, TranslationTask):
    """Translation; the system options say how experts are computed."""
