"""Route: logits_TE -> Routing, the decision which token goes where.

T tokens, E experts, K top_k, C capacity, R rows. A "row" is one place in the expert-major buffer, a
"source" is t * K + j: the j-th copy of token t.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_tutel.drop_policies import slot_order


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What one micro-batch on one rank decided; dispatch, exchange, losses and metrics read it.

    Attributes:
        expert_ids_TK: [T, K] int64, the experts of each token, best first.
        weights_TK: [T, K], what the copies' outputs are multiplied with; differentiable.
        slots_TK: [T, K] int64, place within the expert; -1 for padding tokens.
        counts_E: [E] int64, rows kept by each expert.
        assigned_KE: [K, E] int64, assignments of each choice before dropping.
        dropped_K: [K] int64, assignments of each choice that found their expert full.
        num_tokens: [] int64, tokens that are not padding.
        probs_TE: [T, E], softmax of the logits; differentiable.
        real_T: [T] bool, False for padding tokens; None when there is no padding.
        row_of_TK: [T, K] int64, the row of each copy; -1 = dropped.
        source_of_R: [R] int64, the copy that fills each row; -1 = padding row.
        capacity: places per expert in the padded layout (row = e * C + slot); None for the compact
            one (row = offset of e + slot).
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    slots_TK: Tensor
    counts_E: Tensor
    assigned_KE: Tensor
    dropped_K: Tensor
    num_tokens: Tensor
    probs_TE: Tensor
    real_T: Tensor | None
    row_of_TK: Tensor
    source_of_R: Tensor
    capacity: int | None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Routing before its rows are laid out: who goes to which slot, and what was dropped."""

    expert_ids_TK: Tensor
    weights_TK: Tensor
    slots_TK: Tensor
    kept_TK: Tensor
    counts_E: Tensor
    assigned_KE: Tensor
    dropped_K: Tensor
    num_tokens: Tensor
    probs_TE: Tensor
    real_T: Tensor | None


def assign(
    logits_TE: Tensor,
    top_k: int,
    capacity_factor: float = 0.0,
    *,
    drop_policy: str = "position",
    training: bool = False,
    real_T: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
) -> Assignment:
    """Choose experts and slots for every token.

    Args:
        logits_TE: [T, E] gate logits.
        top_k: experts per token, 1 to E.
        capacity_factor: f > 0: C = K * ceil(f * T_real / E); 0: nothing is dropped; f < 0: as |f|
            (how much of it is needed only sizes buffers, see `lay_out`).
        drop_policy: who keeps a place when an expert is full, see `drop_policies.slot_order`.
        training: whether a policy may draw random numbers.
        real_T: [T] bool, False for padding; None when every token is real.
        time_first: (time, batch) when token t is (t // batch, t % batch), as fairseq lays tokens out;
            slots are then given in (sentence, time) order all the same.

    Raises:
        ValueError: `top_k` is not in 1 .. E.

    Source: GShard (Lepikhin et al. 2020) section 2.2 for capacity and order; Tutel for any k.
    """
    num_experts = logits_TE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k is {top_k} but there are {num_experts} experts; "
            f"choose a value from 1 to {num_experts}."
        )
    probs_TE = torch.softmax(logits_TE, dim=1)
    expert_ids_TK = choose_experts(probs_TE.detach(), top_k)
    weights_TK = probs_TE.gather(1, expert_ids_TK)
    if top_k > 1:
        total_T1 = weights_TK.sum(dim=1, keepdim=True)
        weights_TK = weights_TK / total_T1.clamp_min(torch.finfo(weights_TK.dtype).eps)
    if drop_policy == "position" or capacity_factor == 0.0:  # nobody is dropped: any order will do
        slots_TK, assigned_KE = assign_slots(expert_ids_TK, num_experts, real_T, time_first)
    else:
        position_T = sentence_order(len(logits_TE), time_first, logits_TE.device)
        order_N = slot_order(drop_policy, probs_TE.detach(), expert_ids_TK, position_T, training)
        slots_TK, assigned_KE = assign_slots_by(order_N, expert_ids_TK, num_experts, real_T)
    num_tokens = assigned_KE[0].sum()
    totals_E = assigned_KE.sum(dim=0)
    kept_TK = slots_TK >= 0
    dropped_K = torch.zeros_like(assigned_KE[:, 0])
    counts_E = totals_E
    if capacity_factor != 0.0:
        limit = _capacity(capacity_factor, top_k, num_experts, num_tokens)
        full_TK = slots_TK >= limit
        dropped_K = full_TK.sum(dim=0)
        kept_TK = kept_TK & ~full_TK
        counts_E = torch.minimum(totals_E, limit)
    return Assignment(
        expert_ids_TK=expert_ids_TK,
        weights_TK=weights_TK,
        slots_TK=slots_TK,
        kept_TK=kept_TK,
        counts_E=counts_E,
        assigned_KE=assigned_KE,
        dropped_K=dropped_K,
        num_tokens=num_tokens,
        probs_TE=probs_TE,
        real_T=real_T,
    )


def lay_out(assignment: Assignment, capacity: int | None = None) -> Routing:
    """Give every kept copy its row, and make both row maps.

    Args:
        assignment: from `assign`.
        capacity: places per expert of the padded layout, at least the largest count; None for the
            compact layout. Compact rows number the kept copies on CPU; elsewhere T * K, the unused
            tail marked -1, since the exact number would need a device-to-host read.
    """
    a = assignment
    num_tokens, top_k = a.expert_ids_TK.shape
    if capacity is None:
        offsets_E = a.counts_E.cumsum(0) - a.counts_E
        row_of_TK = offsets_E[a.expert_ids_TK] + a.slots_TK
        on_cpu = a.counts_E.device.type == "cpu"
        num_rows = int(a.counts_E.sum()) if on_cpu else num_tokens * top_k
    else:
        row_of_TK = a.expert_ids_TK * capacity + a.slots_TK
        num_rows = a.counts_E.shape[0] * capacity
    # Dropped copies all land on one spare row behind the last, which is cut off.
    landing_N = torch.where(a.kept_TK, row_of_TK, num_rows).flatten()
    source_of_R = landing_N.new_full((num_rows + 1,), -1)
    source_of_R[landing_N] = torch.arange(num_tokens * top_k, device=landing_N.device)
    return Routing(
        expert_ids_TK=a.expert_ids_TK,
        weights_TK=a.weights_TK,
        slots_TK=a.slots_TK,
        counts_E=a.counts_E,
        assigned_KE=a.assigned_KE,
        dropped_K=a.dropped_K,
        num_tokens=a.num_tokens,
        probs_TE=a.probs_TE,
        real_T=a.real_T,
        row_of_TK=torch.where(a.kept_TK, row_of_TK, -1),
        source_of_R=source_of_R[:num_rows],
        capacity=capacity,
    )


def route(logits_TE: Tensor, top_k: int, capacity_factor: float = 0.0, **options) -> Routing:
    """Assign and lay out in the compact layout; same arguments as `assign`."""
    return lay_out(assign(logits_TE, top_k, capacity_factor, **options))


def choose_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return the ids [T, K] int64 of the K largest scores, largest first; ties: the lower id.

    torch.topk leaves ties open, so it is not used: two runs must choose alike on every device.
    """
    if top_k > 4:
        return scores_TE.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    scores_TE = scores_TE.clone() if top_k > 1 else scores_TE
    chosen = []
    for _ in range(top_k):
        ids_T1 = scores_TE.argmax(dim=1, keepdim=True)
        chosen.append(ids_T1)
        if len(chosen) < top_k:
            scores_TE.scatter_(1, ids_T1, -math.inf)
    return torch.cat(chosen, dim=1)


def assign_slots(
    expert_ids_TK: Tensor,
    num_experts: int,
    real_T: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Number the copies of each expert: all first choices before all second ones, then token order.

    Returns:
        slots_TK: [T, K] int64, -1 for padding tokens.
        assigned_KE: [K, E] int64, how many tokens made e their j-th choice.
    """
    num_tokens, top_k = expert_ids_TK.shape
    ids_KT = expert_ids_TK.t()
    if real_T is not None:
        ids_KT = torch.where(real_T, ids_KT, num_experts)  # padding sorts behind every expert
    if time_first is not None:
        ids_KT = ids_KT.reshape(top_k, *time_first).transpose(1, 2).reshape(top_k, num_tokens)
    sorted_KT, order_KT = ids_KT.contiguous().sort(dim=1, stable=True)
    edges = torch.arange(num_experts + 1, device=ids_KT.device).expand(top_k, -1).contiguous()
    starts_KE = torch.searchsorted(sorted_KT, edges)  # [K, E + 1]
    assigned_KE = starts_KE.diff(dim=1)
    earlier_KE = assigned_KE.cumsum(0) - assigned_KE
    base_KE = torch.nn.functional.pad(earlier_KE, (0, 1)) - starts_KE
    places_KT = torch.arange(num_tokens, device=ids_KT.device) + base_KE.gather(1, sorted_KT)
    places_KT = torch.where(sorted_KT < num_experts, places_KT, -1)
    slots_KT = torch.empty_like(places_KT).scatter_(1, order_KT, places_KT)
    if time_first is not None:
        time, batch = time_first
        slots_KT = slots_KT.reshape(top_k, batch, time).transpose(1, 2).reshape(top_k, num_tokens)
    return slots_KT.t().contiguous(), assigned_KE


def sentence_order(
    num_tokens: int, time_first: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return the tokens [T] int64 in (sentence, time) order."""
    tokens_T = torch.arange(num_tokens, device=device)
    return tokens_T if time_first is None else tokens_T.view(time_first).t().reshape(-1)


def assign_slots_by(
    order_N: Tensor, expert_ids_TK: Tensor, num_experts: int, real_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Number the copies of each expert in a given order; returns what `assign_slots` does.

    Args:
        order_N: [K * T] int64, the copies in the order in which they take slots; copy j * T + t is
            token t's choice j.
        expert_ids_TK: [T, K] int64.
        num_experts: E.
        real_T: [T] bool, False for padding, which takes no slot.
    """
    num_tokens, top_k = expert_ids_TK.shape
    ids_KT = expert_ids_TK.t()
    if real_T is not None:
        ids_KT = torch.where(real_T, ids_KT, num_experts)  # padding sorts behind every expert
    ids_KT = ids_KT.contiguous()
    assigned_KE = ids_KT.new_zeros(top_k, num_experts + 1)
    assigned_KE.scatter_add_(1, ids_KT, torch.ones_like(ids_KT))
    sorted_N, where_N = ids_KT.flatten()[order_N].sort(stable=True)
    starts_E = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    places_N = torch.arange(len(sorted_N), device=sorted_N.device) - starts_E[sorted_N]
    places_N = torch.where(sorted_N < num_experts, places_N, -1)
    slots_N = torch.empty_like(places_N).scatter_(0, order_N[where_N], places_N)
    return slots_N.view(top_k, num_tokens).t().contiguous(), assigned_KE[:, :num_experts]


def _capacity(factor: float, top_k: int, num_experts: int, num_tokens: Tensor) -> Tensor:
    """Places per expert, K * ceil(|f| * T / E), as an int64 scalar on the tokens' device."""
    share = num_tokens.double() * abs(factor) / num_experts
    return share.ceil().long() * top_k
