"""The GShard formulation (Lepikhin et al. 2020, algorithm 2) as implemented in Meta's fairseq branch.

Dispatch and combine are products with one-hot [T, E, C] masks. Each needs T * E * C * D operations, which
grow with T squared, since E * C is at least K * T. Experts are batched products over [E, C, D].

T tokens, E experts, K top_k, C capacity.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import activate
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant

# Maximum bytes of one mask, by device; a step has about five tensors of this size and reads each often.
MOST_MASK_BYTES = {"cpu": 2**28, "cuda": 2**30}


class Einsum(Variant):
    """A MoE layer of three einsums and batched experts."""

    def __init__(self, case: Case, inputs: Inputs, capacity: int) -> None:
        super().__init__(inputs)
        self.case, self.places = case, capacity

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, probs_TE = top_k_gate(x_TD, self.gate, self.case.top_k)
        combine_TEC = combine_mask(weights_TK, ids_TK, probs_TE.shape[1], self.places)
        return einsum_moe(x_TD, combine_TEC, self._experts)

    def _experts(self, rows_ECD: Tensor) -> Tensor:
        beside = rows_ECD @ self.fc3.mT if self.case.is_glu else None
        return activate(self.case, rows_ECD @ self.fc1.mT, beside) @ self.fc2.mT


def einsum_moe(x_TD: Tensor, combine_TEC: Tensor, experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Return y_TD by the three einsums.

    Args:
        x_TD: tokens.
        combine_TEC: the weight of every token in every slot, from `combine_mask`.
        experts: function [E, C, D] -> [E, C, D].
    """
    dispatch_TEC = combine_TEC.bool().to(x_TD.dtype)
    rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
    return torch.einsum("tec,ecd->td", combine_TEC.to(x_TD.dtype), experts(rows_ECD))


def combine_mask(weights_TK: Tensor, ids_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return combine_TEC: the weight of token t if it is in slot c of expert e, otherwise 0.

    All first choices get slots before second choices; within a choice, earlier tokens come first.
    Assignments without a slot are dropped.
    """
    num_tokens, top_k = ids_TK.shape
    combine_TEC = weights_TK.new_zeros(num_tokens, num_experts, capacity)
    taken_E = ids_TK.new_zeros(num_experts)
    for j in range(top_k):
        chosen_TE = F.one_hot(ids_TK[:, j], num_experts)
        place_T = ((chosen_TE.cumsum(dim=0) - 1 + taken_E) * chosen_TE).sum(dim=1)
        taken_E = taken_E + chosen_TE.sum(dim=0)
        kept_T = place_T < capacity
        place_TC = F.one_hot(place_T.where(kept_T, 0), capacity)
        weighted_TE = (weights_TK[:, j] * kept_T).unsqueeze(1) * chosen_TE
        combine_TEC = combine_TEC + torch.einsum("te,tc->tec", weighted_TE, place_TC.to(weighted_TE.dtype))
    return combine_TEC


def usual_capacity(tokens: int, num_experts: int, top_k: int, factor: float = 1.0) -> int:
    """Return the capacity for a capacity factor; in Meta's branch, the factor is 1 in training."""
    return top_k * math.ceil(factor * tokens / num_experts)


def build(case: Case, inputs: Inputs) -> Einsum:
    """Return the layer with the smallest capacity that drops nothing, so it computes the common function.

    Raises:
        Unsupported: the masks do not fit.
    """
    variant = _build(case, inputs, inputs.busiest)
    variant.note = f"dropless, C={inputs.busiest}"
    return variant


def build_with_drops(case: Case, inputs: Inputs) -> Einsum:
    """Return the layer with the usual capacity K * ceil(T / E); assignments above it are dropped.

    Raises:
        Unsupported: the masks do not fit.
    """
    capacity = usual_capacity(case.tokens, case.num_experts, case.top_k)
    variant = _build(case, inputs, capacity)
    dropped = sum(max(0, load - capacity) for load in inputs.loads_E)
    share = 100 * dropped / sum(inputs.loads_E)
    variant.capacity, variant.note = capacity, f"C={capacity}, {share:.1f} % dropped"
    return variant


def _build(case: Case, inputs: Inputs, capacity: int) -> Einsum:
    # The mask has the gate's precision.
    itemsize = max(inputs.x_TD.dtype.itemsize, 4)
    mask_bytes = case.tokens * case.num_experts * capacity * itemsize
    most = MOST_MASK_BYTES[inputs.x_TD.device.type]
    if mask_bytes > most:
        raise Unsupported(f"its [T, E, C] mask would take {mask_bytes >> 20} MiB, more than {most >> 20}")
    return Einsum(case, inputs, capacity)
