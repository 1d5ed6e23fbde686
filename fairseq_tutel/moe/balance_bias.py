"""Balance without a loss: a bias on the choice that rises for idle experts and falls for busy ones.

E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class BalanceBias(nn.Module):
    """The bias of one layer, and what its experts were asked for since the last update.

    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, algorithm 1.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def count(self, assigned_KE: Tensor) -> None:
        """Add one micro-batch's copies, before dropping and without padding."""
        self.load.add_(assigned_KE.sum(dim=0))

    @torch.no_grad()
    def update(self, load_E: Tensor) -> None:
        """Step by `rate`: up where fewer copies than the mean came, down where more; then count anew.

        Args:
            load_E: [E] int64, the copies of all ranks since the last update.
        """
        # In whole numbers, so that every rank takes the same step: sign(mean - load), times E.
        below_E = load_E.sum() - load_E * len(load_E)
        self.bias.add_(below_E.sign().to(self.bias.dtype), alpha=self.rate)
        self.load.zero_()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Switched on for a model that was trained without: it begins where it would have begun.
        state_dict.setdefault(prefix + "bias", self.bias)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A model made half-precision keeps the bias: steps of 0.001 vanish in bf16.
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self
