"""The routing kernels in plain torch: softmax with top-k, and the assignment of slots and rows.

T tokens, E experts, K top_k, R rows, N = K * T assignments, where j * T + t is choice j of token t.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def choose_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return each token's K best expert ids, [T, K] int64, best first; the lower id wins ties.

    The choice must be deterministic on every device. torch.topk does not define the order of ties.
    """
    if top_k > 4 and scores_TE.dtype == torch.float64:
        return scores_TE.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    if top_k > 4:
        return _ranked_keys(scores_TE).topk(top_k, dim=1).indices
    scores_TE = scores_TE.clone() if top_k > 1 else scores_TE
    chosen = []
    for _ in range(top_k):
        ids_T1 = scores_TE.argmax(dim=1, keepdim=True)
        chosen.append(ids_T1)
        if len(chosen) < top_k:
            scores_TE.scatter_(1, ids_T1, -math.inf)
    return torch.cat(chosen, dim=1) if top_k > 1 else chosen[0]


def _ranked_keys(scores_TE: Tensor) -> Tensor:
    """Map scores to distinct int64 keys in the same order; the lower expert id ranks first in ties."""
    num_experts = scores_TE.shape[1]
    bits_TE = (scores_TE.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    order_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE).to(torch.int64)
    return order_TE * num_experts - torch.arange(num_experts, device=scores_TE.device)


def row_softmax(logits_TE: Tensor) -> Tensor:
    """Compute softmax over the experts of each token.

    On a CPU, torch does not vectorize rows of fewer than 16 fp32 numbers. For [1024, 8] it took 146 µs, and
    with tokens and experts exchanged 30 µs.
    """
    num_tokens, num_experts = logits_TE.shape
    is_slow = num_experts < 16 and num_tokens >= 64 and logits_TE.dtype == torch.float32
    if is_slow and logits_TE.device.type == "cpu":
        return torch.softmax(logits_TE.t(), dim=0).t().contiguous()
    return torch.softmax(logits_TE, dim=1)


def softmax_top_k(logits_TE: Tensor, top_k: int, normalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax and each token's K largest probabilities: (probs_TE, ids_TK, weights_TK).

    The ids are the ids of `choose_experts`.

    Args:
        logits_TE: [T, E], any float dtype, which is also the dtype of probs and weights. If a row has a NaN
            or +inf, all its probabilities are NaN, and its ids are 0 .. K - 1.
        top_k: K, from 1 to E.
        normalize: whether to divide a token's weights by their sum.
    """
    probs_TE = row_softmax(logits_TE)
    ids_TK = choose_experts(probs_TE, top_k)
    weights_TK = probs_TE.gather(1, ids_TK)
    return probs_TE, ids_TK, normalized(weights_TK) if normalize else weights_TK


def normalized(weights_TK: Tensor) -> Tensor:
    """Return the weights divided by their sum for each token."""
    total_T1 = weights_TK.sum(dim=1, keepdim=True)
    return weights_TK / total_T1.clamp_min(torch.finfo(weights_TK.dtype).tiny)


def softmax_top_k_backward(
    probs_TE: Tensor,
    ids_TK: Tensor,
    dprobs_TE: Tensor | None,
    dweights_TK: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Return the gradient of the logits in `softmax_top_k`; an output gradient of None means zeros."""
    wide = torch.promote_types(probs_TE.dtype, torch.float32)
    grads_TE = torch.zeros_like(probs_TE, dtype=wide) if dprobs_TE is None else dprobs_TE.to(wide)
    wide_TE = probs_TE.to(wide)
    if dweights_TK is not None:
        dweights_TK = dweights_TK.to(wide)
        if normalize:
            dweights_TK = _normalized_backward(wide_TE.gather(1, ids_TK), dweights_TK, probs_TE.dtype)
        grads_TE = grads_TE.scatter_add(1, ids_TK, dweights_TK)
    dots_T1 = (wide_TE * grads_TE).sum(dim=1, keepdim=True)
    return (wide_TE * (grads_TE - dots_T1)).to(probs_TE.dtype)


def _normalized_backward(weights_TK: Tensor, dnormalized_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weights in `normalized`, whose sums were rounded to `dtype`."""
    tiny = torch.finfo(dtype).tiny
    total_T1 = weights_TK.sum(dim=1, keepdim=True).to(dtype).to(weights_TK.dtype)
    shift_T1 = (dnormalized_TK * weights_TK).sum(dim=1, keepdim=True) / total_T1
    return (dnormalized_TK - shift_T1.where(total_T1 >= tiny, 0.0)) / total_T1.clamp_min(tiny)


class Rows(NamedTuple):
    """The slots and rows of all assignments; `Routing` describes the fields."""

    slots_TK: Tensor
    assigned_KE: Tensor
    counts_E: Tensor
    dropped_K: Tensor
    row_of_TK: Tensor
    source_of_R: Tensor
    token_of_R: Tensor


def assign_rows(
    ids_TK: Tensor,
    num_experts: int,
    asked_TK: Tensor | None = None,
    order_N: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
    limit: Tensor | None = None,
) -> Rows:
    """Number each expert's assignments and lay the kept ones out as rows, expert by expert.

    Args:
        ids_TK: [T, K] int64, the expert of each assignment, from 0 to E - 1.
        num_experts: E.
        asked_TK: bool, in any strides; False for an assignment that is left out. None: none is left out.
        order_N: [K * T] int64, the assignments in the order in which they take slots; assignment j * T + t
            is choice j of token t. None: first choices before second choices, then in token order.
        time_first: as in `assign_slots`; None with `order_N`.
        limit: [] int64, the number of slots of an expert; later assignments are dropped. None: no limit.
    """
    ids_KT = ids_TK.t() if asked_TK is None else torch.where(asked_TK.t(), ids_TK.t(), num_experts)
    ids_KT = ids_KT.contiguous()
    if order_N is None:
        slots_TK, assigned_KE = assign_slots(ids_KT, num_experts, time_first)
    else:
        slots_TK, assigned_KE = assign_slots_by(order_N, ids_KT, num_experts)
    kept_TK, counts_E = slots_TK >= 0, assigned_KE.sum(dim=0)
    if limit is None:
        dropped_K = torch.zeros_like(assigned_KE[:, 0])
    else:
        full_TK = slots_TK >= limit
        kept_TK, dropped_K, counts_E = kept_TK & ~full_TK, full_TK.sum(dim=0), counts_E.minimum(limit)
    row_of_TK, source_of_R = row_maps(ids_TK, slots_TK, kept_TK, counts_E, None, ids_TK.numel())
    token_of_R = token_of(source_of_R, ids_TK.shape[1])
    return Rows(slots_TK, assigned_KE, counts_E, dropped_K, row_of_TK, source_of_R, token_of_R)


def row_maps(
    ids_TK: Tensor,
    slots_TK: Tensor,
    kept_TK: Tensor,
    counts_E: Tensor,
    capacity: int | None,
    most_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the row of each kept assignment and the assignment of each row: row_of_TK, source_of_R.

    On a GPU, the compact layout has `most_rows` rows, and the unused rows at the end have source -1. The
    exact number of rows, which the CPU uses, would need a device-to-host read.
    """
    if capacity is None:
        offsets_E = counts_E.cumsum(0) - counts_E
        row_of_TK = offsets_E[ids_TK] + slots_TK
        num_rows = int(counts_E.sum()) if counts_E.device.type == "cpu" else most_rows
    else:
        row_of_TK = ids_TK * capacity + slots_TK
        num_rows = counts_E.shape[0] * capacity
    # All assignments without a row write to one spare row after the last row. This row is then removed.
    landing_N = torch.where(kept_TK, row_of_TK, num_rows).flatten()
    source_of_R = landing_N.new_full((num_rows + 1,), -1)
    source_of_R[landing_N] = torch.arange(landing_N.numel(), device=landing_N.device)
    return torch.where(kept_TK, row_of_TK, -1), source_of_R[:num_rows]


def token_of(source_of_R: Tensor, top_k: int) -> Tensor:
    """Return the token of each row; -1 marks an empty row."""
    if top_k == 1:
        return source_of_R
    return source_of_R.div(top_k, rounding_mode="floor")


def assign_slots(
    ids_KT: Tensor, num_experts: int, time_first: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Number each expert's assignments: all tokens' first choices before all second choices.

    Within a choice, the order is the token order.

    Args:
        ids_KT: [K, T] int64, the expert of each assignment; E for no expert.
        num_experts: E.
        time_first: (time, batch) if token t is (t // batch, t % batch). The token order is then also
            (sentence, time).

    Returns:
        slots_TK: [T, K] int64, -1 for assignments without an expert.
        assigned_KE: [K, E] int64, the number of tokens whose j-th choice is e.
    """
    top_k, num_tokens = ids_KT.shape
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


def assign_slots_by(order_N: Tensor, ids_KT: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Number each expert's assignments in a given order, and return results as `assign_slots` does.

    Args:
        order_N: [K * T] int64, the assignments in the order in which they take slots; assignment j * T + t
            is choice j of token t.
        ids_KT: [K, T] int64, the expert of each assignment; E for no expert.
        num_experts: E.
    """
    top_k, num_tokens = ids_KT.shape
    assigned_KE = ids_KT.new_zeros(top_k, num_experts + 1)
    assigned_KE.scatter_add_(1, ids_KT, torch.ones_like(ids_KT))
    sorted_N, where_N = ids_KT.flatten()[order_N].sort(stable=True)
    starts_E = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    places_N = torch.arange(len(sorted_N), device=sorted_N.device) - starts_E[sorted_N]
    places_N = torch.where(sorted_N < num_experts, places_N, -1)
    slots_N = torch.empty_like(places_N).scatter_(0, order_N[where_N], places_N)
    return slots_N.view(top_k, num_tokens).t().contiguous(), assigned_KE[:, :num_experts]


def load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a GShard balance loss, E * sum_e share_e * mass_e / tokens, and its gradient for mass_E.

    Args:
        mass_E: the sum of each expert's probabilities over all tokens, fp32 or fp64.
        load_E: int64, the number of assignments of each expert; an expert's share is its part of their sum.
        num_tokens: [] int64.
    """
    num_experts, dtype = len(mass_E), mass_E.dtype
    share_E = load_E.to(dtype) / load_E.sum().clamp_min(1).to(dtype)
    tokens = num_tokens.clamp_min(1).to(dtype)
    return num_experts * (share_E * mass_E).sum() / tokens, num_experts * share_E / tokens
