"""Tasks that carry the system options, and what any task must do to train experts."""

from fairseq_tutel.tasks import (  # noqa: F401
    moe_denoising,
    moe_language_modeling,
    moe_masked_lm,
    moe_translation,
)
