"""Tasks by the names of ours; like every other task they have the system options."""

from fairseq_tutel.plugin.task_options import give_system_options
from fairseq_tutel.tasks import (  # noqa: F401
    moe_denoising,
    moe_language_modeling,
    moe_masked_lm,
    moe_translation,
)

give_system_options()
