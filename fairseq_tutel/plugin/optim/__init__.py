"""Optimizers for experts: a `moe_` variant of every optimizer that fairseq registers."""

from fairseq_tutel.plugin.optim import moe_adam  # noqa: F401 - registers moe_adam before the generic variants
from fairseq_tutel.plugin.optim.moe_optimizer import register_variants

register_variants()
