"""A gate and an expert of your own, in ten lines.

PYTHONPATH=examples fairseq-train … --moe-gate-type own_parts.CalmGate --moe-expert-type own_parts.TanhExpert

Each is built as Class(config), a fairseq_tutel.MoEConfig. A gate maps tokens [T, D] to logits [T, E]. An
expert is one expert: rows [n, D] to rows [n, D]; its parameters are stacked, spread over ranks and saved
like those of our own. The module must be on PYTHONPATH in every command that opens the checkpoint, and, since a
file has nothing imported by itself, in your --user-dir or in

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
