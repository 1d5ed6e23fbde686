"""A user's --user-dir: the plugin, and a custom language model with `ft.moe_layer`."""

import os

import torch
import torch.distributed as dist
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

import fairseq_tutel as ft
from fairseq_tutel.plugin import register

register()
EXPERTS = int(os.environ.get("EXPERTS", 6))


class Experts(nn.Module):
    """A MoE layer that replaces fc1; fc2 is replaced by the identity."""

    def __init__(self, width, hidden):
        super().__init__()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.moe = ft.moe_layer(
            {"type": "top", "k": 2, "capacity_factor": 0.0, "fp32_gate": True},
            width,
            {
                "type": "ffn", "num_experts_per_device": EXPERTS // ranks,
                "hidden_size_per_expert": hidden, "activation_fn": torch.relu,
            },
            scan_expert_func=lambda name, parameter: setattr(parameter, "expert", True),
            seeds=(1, 2, 3),
        )  # fmt: skip

    def forward(self, x):
        return self.moe(x)


@register_model("own_lm", dataclass=TransformerLanguageModelConfig)
class OwnLanguageModel(TransformerLanguageModel):
    """fairseq's language model with experts in every second layer."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        for layer in model.decoder.layers[1::2]:
            layer.fc1 = Experts(layer.fc1.in_features, layer.fc1.out_features)
            layer.activation_fn, layer.fc2 = nn.Identity(), nn.Identity()
        return model
