"""Replaces the MoE layers of a fairseq model by the einsum formulation with the same weights."""

import torch
from torch import Tensor, nn

from benchmarks.peers.einsum import combine_mask, einsum_moe, usual_capacity
from benchmarks.peers.gate import top_k_gate
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.plugin.feed_forward import MoEFeedForward


class EinsumFeedForward(nn.Module):
    """A MoE layer with einsums, called in place of fc1. It has no balance loss, metrics or padding mask.

    Args:
        ours: the MoE layer to replace; its experts must be FFNs with biases.
    """

    def __init__(self, ours: MoEFeedForward) -> None:
        super().__init__()
        self.config = ours.config
        self.gate, self.experts = ours.gate, ours.experts
        # Number of slots per expert; None computes the number from the capacity factor, 1 by default.
        self.capacity: int | None = None

    def begin_call(self, *_: object, **__: object) -> None:
        """Ignore the arguments that fairseq's layer passes to our MoE layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' output for x [time, batch, D], or batch first."""
        x_TD = x.flatten(0, 1)
        num_experts, top_k = self.config.num_experts, self.config.top_k
        weights_TK, ids_TK, _ = top_k_gate(x_TD, self.gate.weight, top_k)
        factor = self.config.capacity_factor or 1.0
        capacity = self.capacity or usual_capacity(len(x_TD), num_experts, top_k, factor)
        combine_TEC = combine_mask(weights_TK, ids_TK, num_experts, capacity)
        return einsum_moe(x_TD, combine_TEC, self._experts).view_as(x)

    def _experts(self, rows_ECD: Tensor) -> Tensor:
        e = self.experts
        hidden = torch.baddbmm(e.fc1_bias.unsqueeze(1), rows_ECD, e.fc1_weight.mT)
        hidden = ACTIVATIONS[self.config.activation].forward(hidden)
        return torch.baddbmm(e.fc2_bias.unsqueeze(1), hidden, e.fc2_weight.mT)
