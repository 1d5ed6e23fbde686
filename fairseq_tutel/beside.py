"""Experts beside the experts: shared ones, that every token goes through, and the residual mixture.

T tokens, D model_dim, H hidden_dim.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.config import MoEConfig, label_of
from fairseq_tutel.custom import build_custom, is_custom, redraw
from fairseq_tutel.experts import ACTIVATION_FNS
from fairseq_tutel.initial import draw_linear, hashed_seed, seeded_generator


class DenseExpert(nn.Module):
    """One expert for all tokens, the same on every rank: no part of the experts' exchange.

    n shared experts are one of n times the hidden dimension: the sum of their outputs is the same.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        hidden_dim = config.hidden_dim
        is_glu = config.expert_type == "glu"
        bias = config.expert_bias
        self.fc1 = nn.Linear(config.model_dim, hidden_dim, bias)
        self.fc3 = nn.Linear(config.model_dim, hidden_dim, bias) if is_glu else None
        self.fc2 = nn.Linear(hidden_dim, config.model_dim, bias)
        self.hidden_layer_norm = nn.LayerNorm(hidden_dim) if config.hidden_layer_norm else None

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the weights as an expert's are drawn."""
        for tensor, parameter in self.named_parameters():
            layer, _, kind = tensor.partition(".")
            if layer == "hidden_layer_norm" or parameter.is_meta:
                continue
            fan_in = getattr(self, layer).in_features
            generator = seeded_generator(seed, name, -1, tensor)
            draw_linear(parameter.data, fan_in, kind, self.config.init_std, generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the expert's output for every token."""
        hidden_TH = self.fc1(x_TD)
        if self.fc3 is not None:
            hidden_TH = F.silu(hidden_TH) * self.fc3(x_TD)
        else:
            hidden_TH = ACTIVATION_FNS[self.config.activation](hidden_TH)
        hidden_TH = F.dropout(hidden_TH, self.config.activation_dropout, self.training)
        if self.hidden_layer_norm is not None:
            hidden_TH = self.hidden_layer_norm(hidden_TH)
        return self.fc2(hidden_TH)


class Beside(nn.Module):
    """What a layer computes beside its routed experts.

    y = routed                                            with neither,
    y = c_0 * routed + c_1 * dense(x), c = softmax(W x + b)  with `residual`,
    y + sum of the shared experts of x                    with `shared_experts`.

    Source: residual: Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.1; shared: Dai et al. 2024
    (DeepSeekMoE), section 3.2.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        wide = dataclasses.replace(
            config, hidden_dim=max(config.shared_experts, 1) * config.hidden_dim
        )
        self.shared = _dense(wide) if config.shared_experts else None
        self.dense = _dense(config) if config.residual else None
        self.mix = nn.Linear(config.model_dim, 2) if config.residual else None

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw from generators of (seed, name), alike on every rank."""
        for part in ("shared", "dense"):
            module = getattr(self, part)
            if isinstance(module, DenseExpert):
                module.reset_parameters(seed, f"{name}.{part}")
            elif module is not None:
                redraw(module, hashed_seed(seed, name, -1, part))
        if self.mix is not None and not self.mix.weight.is_meta:
            for kind, parameter in self.mix.named_parameters():
                generator = seeded_generator(seed, name, -1, f"mix.{kind}")
                draw_linear(parameter.data, self.config.model_dim, kind, 0.0, generator)

    def forward(self, x_TD: Tensor, routed_TD: Tensor, real_T: Tensor | None) -> Tensor:
        """Return the layer's output; 0 for padding, as the routed experts' is."""
        y_TD = routed_TD
        if self.dense is not None and self.mix is not None:
            # Autocast on a GPU takes a softmax in fp32.
            mix_T2 = torch.softmax(self.mix(x_TD), dim=1).to(routed_TD.dtype)
            y_TD = mix_T2[:, :1] * routed_TD + mix_T2[:, 1:] * self.dense(x_TD)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        if y_TD is not routed_TD and real_T is not None:
            y_TD = y_TD.masked_fill(~real_T.unsqueeze(1), 0.0)
        return y_TD


def _dense(config: MoEConfig) -> nn.Module:
    """Return one expert of this kind for all tokens."""
    if is_custom(config.expert_type):
        return build_custom(label_of("expert_type"), config.expert_type, config)
    return DenseExpert(config)
