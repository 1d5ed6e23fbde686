"""Optimizers for experts: a `moe_` variant of every optimizer that fairseq registers."""

from fairseq_tutel.optim import moe_adam, moe_optimizer, zero

moe_adam.register()
moe_optimizer.register_variants(zero.ZeroOptimizerMixin)
