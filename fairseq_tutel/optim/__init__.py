"""Optimizers that know experts: a `moe_` twin of every optimizer that fairseq registers."""

from fairseq_tutel.optim import moe_adam, moe_optimizer, zero

moe_adam.register()
moe_optimizer.register_twins(zero.ZeroOptimizerMixin)
