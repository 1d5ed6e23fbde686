"""Gate: x_TD -> logits_TE.

T tokens, D model_dim, E experts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.config import MoEConfig


class LinearGate(nn.Module):
    """Score tokens by one linear map without bias, in fp32 (fp64 for fp64 input) unless asked otherwise.

    Why fp32: the softmax over experts is taken of these logits, and a rounding in half precision
    swaps experts between two forwards of one token.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.fp32 = config.gate_fp32
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.model_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the weight as nn.Linear does: uniform within 1 / sqrt(D)."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return logits_TE, fp32 (or fp64) if `config.gate_fp32`, else in x's dtype."""
        if not self.fp32:
            return F.linear(x_TD, self.weight)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))


def build_gate(config: MoEConfig) -> nn.Module:
    """Return the gate that `config.gate_type` names."""
    return {"linear": LinearGate}[config.gate_type](config)
