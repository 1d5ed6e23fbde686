"""Tasks that carry the system options, and what any task must do to train experts."""

from fairseq_tutel.tasks import moe_language_modeling, moe_translation  # noqa: F401
