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


class CosineGate(nn.Module):
    """Score tokens by the cosine between a projection of them and one direction per expert.

    logits = exp(min(t, ln 100)) * normalize(W x + b) . normalize(s_e), with a learned temperature t.
    In fp32 (fp64 for fp64 input) unless asked otherwise.

    Source: Chi et al. 2022 (X-MoE), section 3.2; initialisation as in Tutel's cosine_top.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.fp32 = config.gate_fp32
        self.first_temperature = config.gate_temperature
        dim = config.gate_projection_dim
        self.projection_weight = nn.Parameter(torch.empty(dim, config.model_dim))
        self.projection_bias = nn.Parameter(torch.empty(dim))
        self.directions = nn.Parameter(torch.empty(config.num_experts, dim))
        self.log_scale = nn.Parameter(torch.empty(()))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the projection as nn.Linear does, the directions normal by 0.01."""
        bound = 1 / math.sqrt(self.projection_weight.shape[1])
        nn.init.uniform_(self.projection_weight, -bound, bound, generator=generator)
        nn.init.uniform_(self.projection_bias, -bound, bound, generator=generator)
        nn.init.normal_(self.directions, std=0.01, generator=generator)
        nn.init.constant_(self.log_scale, -math.log(self.first_temperature))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return logits_TE, fp32 (or fp64) if `config.gate_fp32`, else in x's dtype."""
        if not self.fp32:
            return self._logits(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._logits(x_TD.to(torch.promote_types(x_TD.dtype, torch.float32)))

    def _logits(self, x_TD: Tensor) -> Tensor:
        dtype = x_TD.dtype
        weight, bias = self.projection_weight.to(dtype), self.projection_bias.to(dtype)
        projected_TP = F.normalize(F.linear(x_TD, weight, bias), dim=1)
        directions_EP = F.normalize(self.directions.to(dtype), dim=1)
        scale = self.log_scale.to(dtype).clamp_max(math.log(100)).exp()
        return F.linear(projected_TP, directions_EP) * scale


GATES = {"linear": LinearGate, "cosine": CosineGate}


def build_gate(config: MoEConfig) -> nn.Module:
    """Return the gate that `config.gate_type` names."""
    return GATES[config.gate_type](config)
