"""Balance biases across ranks: one all-reduce of every layer's load, once an update."""

import torch
import torch.distributed as dist
from torch import nn

from fairseq_tutel.moe.balance_bias import BalanceBias
from fairseq_tutel.ranks.guard import guarded


def update_biases(model: nn.Module) -> None:
    """Step every layer's balance bias by the load of all ranks since the last call. Collective.

    For loops of one's own: after every optimizer step. fairseq's tasks do it by themselves.

    Args:
        model: holds the same biases on every rank of the default group.
    """
    biases = [module for module in model.modules() if isinstance(module, BalanceBias)]
    if not biases:
        return
    load = torch.cat([bias.load for bias in biases])
    if dist.is_available() and dist.is_initialized():
        with guarded("the all-reduce of the experts' load"):
            dist.all_reduce(load)
    for bias, load_E in zip(biases, load.split([len(b.load) for b in biases]), strict=True):
        bias.update(load_E)
