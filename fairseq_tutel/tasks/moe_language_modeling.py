"""moe_language_modeling: fairseq's language_modeling with the system options."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_tutel.flags import SystemOptions
from fairseq_tutel.task_mixin import MoETaskMixin


@dataclass
class MoELanguageModelingConfig(SystemOptions, LanguageModelingConfig):  # type: ignore[valid-type,misc]
    """The stock task's options and the system options."""


@register_task("moe_language_modeling", dataclass=MoELanguageModelingConfig)
class MoELanguageModelingTask(MoETaskMixin, LanguageModelingTask):
    """Language modeling; the system options say how experts are computed."""
