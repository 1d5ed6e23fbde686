"""A gate and an expert of your own, in ten lines.

PYTHONPATH=examples fairseq-train … --moe-gate-type own_parts.CalmGate --moe-expert-type own_parts.TanhExpert

Each is constructed as Class(config) with a fairseq_tutel.MoEConfig. A gate maps tokens [T, D] to logits [T, E].
An expert class is one expert: rows [n, D] to rows [n, D]. Its parameters are stacked, spread over ranks and
saved like those of built-in experts. Every command that opens the checkpoint needs the module on PYTHONPATH. Since
a checkpoint cannot import modules, also import it in your --user-dir, or give

    --model-overrides "{'moe_gate_type': 'own_parts.CalmGate', 'moe_expert_type': 'own_parts.TanhExpert'}"
"""  # noqa: E501 - a command line

import torch
from torch import nn


class CalmGate(nn.Linear):
    """A linear gate whose logits stay between -4 and 4."""

    def __init__(self, config):
        super().__init__(config.model_dim, config.num_experts)

    def forward(self, x_TD):
        """Return logits_TE."""
        return 4 * torch.tanh(super().forward(x_TD))


class TanhExpert(nn.Sequential):
    """A feed-forward network with tanh."""

    def __init__(self, config):
        up, down = (config.model_dim, config.hidden_dim), (config.hidden_dim, config.model_dim)
        super().__init__(nn.Linear(*up), nn.Tanh(), nn.Linear(*down))
