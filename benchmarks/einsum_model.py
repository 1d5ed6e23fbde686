"""Layers that take the place of ours inside a fairseq model, with its weights."""

import torch
from torch import Tensor, nn

from benchmarks.peers.bare import bare_moe
from benchmarks.peers.einsum import combine_mask, einsum_moe, usual_capacity
from benchmarks.peers.gate import top_k_gate
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.plugin.feed_forward import MoEFeedForward


class _FeedForward(nn.Module):
    """A layer that fairseq calls instead of fc1; it has no balance loss, metrics or padding.

    Args:
        ours: the layer that it replaces, whose experts have two maps.
    """

    def __init__(self, ours: MoEFeedForward) -> None:
        super().__init__()
        self.config = ours.config
        self.gate, self.experts = ours.gate, ours.experts
        # Slots of an expert; None for those of the capacity factor, 1 by default.
        self.capacity: int | None = None

    def begin_call(self, *_: object, **__: object) -> None:
        """Take what our layer takes from the stock one, which is not of use here."""


class BareFeedForward(_FeedForward):
    """The bare operations of a layer with relu experts, without their biases; see `peers.bare`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' output for x [time, batch, D], or batch first."""
        weights = self.gate.weight, self.experts.fc1_weight, self.experts.fc2_weight
        return bare_moe(x.flatten(0, 1), *weights, self.config.top_k).view_as(x)


class EinsumFeedForward(_FeedForward):
    """The einsum formulation, for experts with biases."""

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
