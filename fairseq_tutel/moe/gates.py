"""Gates are modules that compute a logit for each token and expert, with noise in training.

Shapes use T for tokens, D for model_dim and E for experts. The noise comes from torch's global generator.
fairseq seeds this generator in every update, and activation checkpointing restores its state. Recomputed
and resumed forward passes therefore choose the same experts.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.kernels import gate_product
from fairseq_tutel.moe.build import build_custom, hashed_seed, redraw, seeded_generator
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.option import is_custom


class LinearGate(nn.Module):
    """A linear gate without bias. If `gate_fp32` is set, the gate computes in fp32 (fp64 for fp64 input).

    With half-precision logits, rounding errors would change the experts of some tokens. On an NVIDIA GPU,
    `kernels.gate_product` multiplies bf16 tokens and weights without making fp32 copies.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.fp32_gate = config.gate_fp32
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.model_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialize the gate's weight as nn.Linear does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the logits [T, E] in the weight's dtype, or in fp32 (or fp64) if `gate_fp32` is set."""
        if not self.fp32_gate:
            return F.linear(x_TD.to(self.weight.dtype), self.weight)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        # For few tokens, entering torch.autocast would take half of the gate's time.
        if not torch.is_autocast_enabled(x_TD.device.type):
            if gate_product.is_supported(x_TD, self.weight):
                return gate_product.product(x_TD, self.weight)
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))


class BiasedGate(LinearGate):
    """A linear gate with a learned bias for each expert, initially 0, as in NLLB-MoE's `router_bias`."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(torch.empty(config.num_experts))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialize the weight as LinearGate does, and the bias with zeros."""
        super().reset_parameters(generator)
        nn.init.zeros_(self.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the logits [T, E] in the same dtype as LinearGate does."""
        logits_TE = super().forward(x_TD)
        return logits_TE + self.bias.to(logits_TE.dtype)


class CosineGate(nn.Module):
    """A gate that scores a token by the cosine between its projection and one direction per expert.

    The logits are exp(min(t, ln 100)) * normalize(W x + b) . normalize(s_e), with learned W, b, s_e and t.

    The gate is from X-MoE (Chi et al. 2022, section 3.2), and is initialized as in Tutel.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.fp32_gate = config.gate_fp32
        self.first_temperature = config.gate_temperature
        dim = config.gate_projection_dim
        self.projection_weight = nn.Parameter(torch.empty(dim, config.model_dim))
        self.projection_bias = nn.Parameter(torch.empty(dim))
        self.directions = nn.Parameter(torch.empty(config.num_experts, dim))
        self.log_scale = nn.Parameter(torch.empty(()))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialize the projection as nn.Linear does, and the experts' directions with normal values."""
        bound = 1 / math.sqrt(self.projection_weight.shape[1])
        nn.init.uniform_(self.projection_weight, -bound, bound, generator=generator)
        nn.init.uniform_(self.projection_bias, -bound, bound, generator=generator)
        nn.init.normal_(self.directions, std=0.01, generator=generator)
        nn.init.constant_(self.log_scale, -math.log(self.first_temperature))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the logits [T, E] in the weights' dtype, or in fp32 (or fp64) if `gate_fp32` is set."""
        if not self.fp32_gate:
            return self._logits(x_TD.to(self.directions.dtype))
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._logits(x_TD.to(torch.promote_types(x_TD.dtype, torch.float32)))

    def _logits(self, x_TD: Tensor) -> Tensor:
        dtype = x_TD.dtype
        weight, bias = self.projection_weight.to(dtype), self.projection_bias.to(dtype)
        projected_TP = F.normalize(F.linear(x_TD, weight, bias), dim=1)
        directions_EP = F.normalize(self.directions.to(dtype), dim=1)
        scale = self.log_scale.to(dtype).clamp_max(math.log(100)).exp()
        return F.linear(projected_TP, directions_EP) * scale


GATES = {"linear": LinearGate, "biased": BiasedGate, "cosine": CosineGate}


def build_gate(config: MoEConfig, kind: str | type) -> nn.Module:
    """Build the configured gate, which is a built-in gate or a user's class."""
    if is_custom(kind):
        return build_custom(kind, config)
    return GATES[str(kind)](config)


def reset_gate(gate: Any, seed: int, name: str, tensor: str) -> None:
    """Initialize a gate's parameters from (seed, name, tensor name), with equal values on every rank."""
    if isinstance(gate, LinearGate | CosineGate):
        gate.reset_parameters(seeded_generator(seed, name, -1, tensor))
    elif hasattr(gate, "moe_config"):
        redraw(gate, hashed_seed(seed, name, -1, tensor))


def gate_input(x_TD: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """Apply jitter (a factor 1 ± j) and dropout to the gate's input in training (Fedus et al. 2021)."""
    if not training:
        return x_TD
    if config.input_jitter > 0:
        # The jitter is computed in fp32, because half precision has only few numbers near 1.
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        low, high = 1 - config.input_jitter, 1 + config.input_jitter
        x_TD = (wide_TD * torch.empty_like(wide_TD).uniform_(low, high)).to(x_TD.dtype)
    return F.dropout(x_TD, config.input_dropout, training) if config.input_dropout else x_TD


def gate_logits(gate: nn.Module, x_TD: Tensor, config: MoEConfig) -> Tensor:
    """Run a gate and return its logits [T, E]; raise ValueError if their shape is wrong."""
    logits_TE = gate(x_TD)
    expected = x_TD.shape[0], config.num_experts
    if logits_TE.shape != expected:
        raise ValueError(
            f"gate {type(gate).__name__} gave logits of shape {tuple(logits_TE.shape)} for {expected[0]} "
            f"tokens and {expected[1]} experts; return one row per token and one column per expert."
        )
    return logits_TE


def noisy_logits(logits_TE: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """Add Gaussian noise to the logits in training; routing and balance losses use the noisy logits."""
    if not training or config.gate_noise == 0:
        return logits_TE
    return logits_TE + torch.randn_like(logits_TE) * config.noise_std
