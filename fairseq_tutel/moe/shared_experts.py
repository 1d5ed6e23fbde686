"""Shared and residual experts of an MoE layer, for T tokens, model_dim D and hidden_dim H."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.moe.build import build_custom, draw_linear, hashed_seed, redraw, seeded_generator
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.experts import activation_of, feed_forward
from fairseq_tutel.option import is_custom


class DenseExpert(nn.Module):
    """The sum of n shared experts, which every token uses and every rank holds.

    The n shared experts are initialized separately and computed as one expert with n times the hidden
    dimension. A hidden layer norm normalizes over the hidden dimensions of all n experts together.
    """

    def __init__(self, config: MoEConfig, count: int) -> None:
        super().__init__()
        self.config = config
        hidden_dim = count * config.hidden_dim
        is_glu = config.expert_type == "glu"
        bias = config.expert_bias
        self.fc1 = nn.Linear(config.model_dim, hidden_dim, bias)
        self.fc3 = nn.Linear(config.model_dim, hidden_dim, bias) if is_glu else None
        self.fc2 = nn.Linear(hidden_dim, config.model_dim, bias)
        self.hidden_layer_norm = nn.LayerNorm(hidden_dim) if config.hidden_layer_norm else None

    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize each of the n shared experts with the same distribution as a routed expert."""
        for tensor, parameter in self.named_parameters():
            layer, _, kind = tensor.partition(".")
            if layer == "hidden_layer_norm" or parameter.is_meta:
                continue
            fan_in = self.config.hidden_dim if layer == "fc2" else self.config.model_dim
            generator = seeded_generator(seed, name, -1, tensor)
            draw_linear(parameter.data, fan_in, kind, self.config.init_std, generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the summed output of the n shared experts for every token."""
        activate, norm = activation_of(self.config), self.hidden_layer_norm
        return feed_forward(
            x_TD, lambda name, x: getattr(self, name)(x), self.config, activate, norm, self.training
        )


class CustomSum(nn.Module):
    """The sum of n shared experts of a user's class, which every token uses."""

    def __init__(self, config: MoEConfig, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build_custom(config.expert_type, config) for _ in range(count))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the summed output of the n shared experts for every token."""
        return torch.stack([part(x_TD) for part in self.parts]).sum(0)


class SharedResidualExperts(nn.Module):
    """This module combines the routed experts' output with shared experts and a residual expert (`dense`).

    y = c_0 * routed + c_1 * dense(x), c = softmax(W x + b)  with `residual`,
    y = g * routed + (1 - g) * dense(x), g = sigmoid(w x + b)  with `cmr`,
    y + shared_1(x) + ... + shared_n(x)  with `shared_experts`.

    `residual` is from Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.1. `cmr` is from NLLB Team 2022,
    section 6.2, and from Meta's nllb branch. Shared experts are from DeepSeekMoE (Dai et al. 2024).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        count = config.shared_experts
        self.shared = _experts_for_all(config, count) if count else None
        self.dense = _experts_for_all(config, 1) if config.residual or config.cmr else None
        self.mix = nn.Linear(config.model_dim, 2) if config.residual else None
        self.cmr_gate = nn.Linear(config.model_dim, 1) if config.cmr else None

    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize all parameters from (seed, name), so that all ranks get equal values."""
        for part in ("shared", "dense"):
            module = getattr(self, part)
            if isinstance(module, DenseExpert):
                module.reset_parameters(seed, f"{name}.{part}")
            for i, expert in enumerate(module.parts if isinstance(module, CustomSum) else ()):
                redraw(expert, hashed_seed(seed, name, i, part))
        for part in ("mix", "cmr_gate"):
            gate = getattr(self, part)
            if gate is None or gate.weight.is_meta:
                continue
            for kind, parameter in gate.named_parameters():
                generator = seeded_generator(seed, name, -1, f"{part}.{kind}")
                draw_linear(parameter.data, self.config.model_dim, kind, 0.0, generator)

    def cmr_gate_of(self, x_TD: Tensor) -> Tensor | None:
        """Return the CMR gate g [T, 1], the weight of the routed experts' output; None without `cmr`.

        In training, dropout sets g to 0 for some tokens, and divides all other g by 1 - `cmr_gate_drop`.
        """
        if self.cmr_gate is None:
            return None
        if not torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(self.cmr_gate.weight.dtype)
        return F.dropout(torch.sigmoid(self.cmr_gate(x_TD)), self.config.cmr_gate_drop, self.training)

    def forward(
        self, x_TD: Tensor, routed_TD: Tensor, real_T: Tensor | None, cmr_T1: Tensor | None
    ) -> Tensor:
        """Combine the routed output with shared and residual experts; `cmr_T1` is from `cmr_gate_of`."""
        y_TD = routed_TD
        if self.dense is not None:
            if self.mix is not None:
                # On a GPU, autocast makes the result of softmax fp32.
                mix_T2 = torch.softmax(self.mix(x_TD), dim=1).to(routed_TD.dtype)
                of_routed_T1, of_dense_T1 = mix_T2[:, :1], mix_T2[:, 1:]
            else:
                assert cmr_T1 is not None
                of_routed_T1 = cmr_T1.to(routed_TD.dtype)
                of_dense_T1 = 1 - of_routed_T1
            y_TD = of_routed_T1 * routed_TD + of_dense_T1 * self.dense(x_TD)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        if y_TD is not routed_TD and real_T is not None:
            y_TD = y_TD.masked_fill(~real_T.unsqueeze(1), 0.0)
        return y_TD


def _experts_for_all(config: MoEConfig, count: int) -> nn.Module:
    """Build a module that sums `count` shared experts of the layer's expert type for every token."""
    if is_custom(config.expert_type):
        return CustomSum(config, count)
    return DenseExpert(config, count)
