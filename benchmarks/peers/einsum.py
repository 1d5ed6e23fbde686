"""The GShard formulation (Lepikhin et al. 2020, algorithm 2), as Meta's fairseq branch has it.

Dispatch and combine are products with one-hot [T, E, C] masks: T * E * C * D operations each, which grows
as T squared since E * C is at least K * T. Experts are batched products over [E, C, D].

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

# Of one mask, by device; a step holds about five of its size, and goes over each again and again.
MOST_MASK_BYTES = {"cpu": 2**28, "cuda": 2**30}


class Einsum(Variant):
    """Three einsums around batched experts."""

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
        combine_TEC: the weight of every token in every slot, as `combine_mask` gives it.
        experts: [E, C, D] -> [E, C, D].
    """
    dispatch_TEC = combine_TEC.bool().to(x_TD.dtype)
    rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
    return torch.einsum("tec,ecd->td", combine_TEC.to(x_TD.dtype), experts(rows_ECD))


def combine_mask(weights_TK: Tensor, ids_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return combine_TEC: the weight of token t in slot c of expert e, 0 where it is not there.

    Slots go to all first choices before all second choices, then by token; an assignment without a slot is
    dropped.
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
    """Return the capacity of a factor; Meta's branch trains with 1."""
    return top_k * math.ceil(factor * tokens / num_experts)


def build(case: Case, inputs: Inputs) -> Einsum:
    """Return it with the least capacity that drops nothing: the same function as all others.

    Raises:
        Unsupported: the masks do not fit.
    """
    variant = _build(case, inputs, inputs.busiest)
    variant.note = f"dropless, C={inputs.busiest}"
    return variant


def build_with_drops(case: Case, inputs: Inputs) -> Einsum:
    """Return it with its usual capacity, K * ceil(T / E): what is above that is dropped.

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
    # The mask is made in the gate's precision.
    itemsize = max(inputs.x_TD.dtype.itemsize, 4)
    mask_bytes = case.tokens * case.num_experts * capacity * itemsize
    most = MOST_MASK_BYTES[inputs.x_TD.device.type]
    if mask_bytes > most:
        raise Unsupported(f"its [T, E, C] mask would take {mask_bytes >> 20} MiB, more than {most >> 20}")
    return Einsum(case, inputs, capacity)
