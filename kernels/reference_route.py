"""The routing kernels in plain torch: softmax with top-k, and the assignment of slots and rows.

T tokens, E experts, K top_k, R rows, N = K * T assignments. Assignment j * T + t is choice j of token t.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def choose_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return each token's K best expert ids, [T, K] int64, best first; the lower id wins ties.

    The choice must be deterministic on every device. torch.topk does not define the order of ties.
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
    return torch.cat(chosen, dim=1) if top_k > 1 else chosen[0]


def row_softmax(logits_TE: Tensor) -> Tensor:
    """Compute softmax over the experts of each token.

    On a CPU, torch does not vectorize rows of fewer than 16 fp32 numbers. For logits [1024, 8], softmax
    took 146 µs, and softmax of the transposed logits took 30 µs.
    """
    num_tokens, num_experts = logits_TE.shape
    is_slow = num_experts < 16 and num_tokens >= 64 and logits_TE.dtype == torch.float32
    if is_slow and logits_TE.device.type == "cpu":
        return torch.softmax(logits_TE.t(), dim=0).t().contiguous()
    return torch.softmax(logits_TE, dim=1)


def softmax_top_k(logits_TE: Tensor, top_k: int, normalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax and each token's K largest probabilities: (probs_TE, ids_TK, weights_TK).

    `choose_experts` chooses the ids.

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
    """Return the gradient of the input of `normalized`, which computed the sums in `dtype`."""
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
    tiles: Tensor | None = None


def assign_rows(
    ids_TK: Tensor,
    num_experts: int,
    asked_TK: Tensor | None = None,
    order_N: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
    limit: Tensor | None = None,
) -> Rows:
    """Number each expert's assignments, and assign rows to the kept assignments, expert by expert.

    Args:
        ids_TK: [T, K] int64, the expert of each assignment, from 0 to E - 1.
        num_experts: E.
        asked_TK: bool, with any strides; False leaves an assignment out. None: no assignment is left out.
        order_N: [K * T] int64, the assignments in the order in which they take slots; assignment j * T + t
            is choice j of token t. None: first choices before second choices, each in token order.
        time_first: (time, batch) if token t is step t // batch of sentence t % batch. Tokens then take
            slots in the order of (sentence, time). Must be None if `order_N` is given.
        limit: [] int64, the number of slots of an expert; later assignments are dropped. None: no limit.
    """
    num_tokens, top_k = ids_TK.shape
    ids_KT = ids_TK.t() if asked_TK is None else torch.where(asked_TK.t(), ids_TK.t(), num_experts)
    sources_KT = torch.arange(ids_TK.numel(), device=ids_TK.device).view(num_tokens, top_k).t()
    # The expert and the number t * K + j of each assignment, in the order in which assignments take slots.
    ids_N, sources_N = (_in_order(values_KT, order_N, time_first) for values_KT in (ids_KT, sources_KT))
    # After sorting, each expert's assignments are adjacent, and assignments that are left out come last.
    ids_N, where_N = ids_N.sort(stable=True)
    sources_N, places_N = sources_N.gather(0, where_N), torch.arange(len(ids_N), device=ids_N.device)
    starts_E = torch.searchsorted(ids_N, torch.arange(num_experts + 1, device=ids_N.device))
    slots_N, row_N, counts_E = places_N - starts_E.gather(0, ids_N), places_N, starts_E.diff()
    assigned_KE = ids_KT.new_zeros(top_k, num_experts + 1)
    assigned_KE = assigned_KE.scatter_add_(1, ids_KT, torch.ones_like(ids_KT))[:, :num_experts].contiguous()
    dropped_K = assigned_KE.new_zeros(top_k)
    if asked_TK is not None:
        slots_N = slots_N.where(ids_N < num_experts, -1)
        row_N = row_N.where(slots_N >= 0, -1)
    if limit is not None:
        dropped_K.scatter_add_(0, sources_N % top_k, (slots_N >= limit).to(torch.int64))
        counts_E = counts_E.minimum(limit)
        row_N = F.pad(counts_E.cumsum(0), (1, 0)).gather(0, ids_N) + slots_N
        row_N = row_N.where((slots_N >= 0) & (slots_N < limit), -1)
    slots_TK, row_of_TK = (
        torch.empty_like(values_N).scatter_(0, sources_N, values_N).view(num_tokens, top_k)
        for values_N in (slots_N, row_N)
    )
    source_of_R = sources_N if row_N is places_N else _compacted(sources_N, row_N)
    token_of_R = token_of(source_of_R, top_k)
    return Rows(slots_TK, assigned_KE, counts_E, dropped_K, row_of_TK, source_of_R, token_of_R)


def _in_order(values_KT: Tensor, order_N: Tensor | None, time_first: tuple[int, int] | None) -> Tensor:
    """Return the values of all assignments, in the order in which they take slots; see `assign_rows`."""
    if time_first is not None:
        values_KT = values_KT.reshape(len(values_KT), *time_first).transpose(1, 2)
    values_N = values_KT.reshape(-1)
    return values_N if order_N is None else values_N.gather(0, order_N)


def _compacted(sources_N: Tensor, row_N: Tensor) -> Tensor:
    """Return the entries of `sources_N` whose assignments have a row, in the order of the rows.

    On a GPU, the result has as many entries as there are assignments, and the unused entries at the end
    are -1. Computing the exact number of rows would need a device-to-host read.
    """
    if row_N.device.type == "cpu":
        return sources_N[row_N >= 0]
    return _by_row(sources_N, row_N, len(row_N))


def _by_row(sources_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Return each row's assignment, or -1 for an empty row. `row_N` is -1 for assignments without a row."""
    # All assignments without a row write to a spare row after the last row. The spare row is then removed.
    source_of_R = sources_N.new_full((num_rows + 1,), -1)
    return source_of_R.scatter_(0, row_N.where(row_N >= 0, num_rows), sources_N)[:num_rows]


def row_maps(
    ids_TK: Tensor,
    slots_TK: Tensor,
    kept_TK: Tensor,
    counts_E: Tensor,
    capacity: int | None,
    most_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the row of each kept assignment and the assignment of each row: row_of_TK, source_of_R.

    With a capacity, every expert has `capacity` rows. Without one, there are no gaps between experts' rows.
    On a GPU, there are then `most_rows` rows, and the unused rows at the end have source -1.
    """
    if capacity is None:
        offsets_E = counts_E.cumsum(0) - counts_E
        row_of_TK = offsets_E[ids_TK] + slots_TK
        num_rows = int(counts_E.sum()) if counts_E.device.type == "cpu" else most_rows
    else:
        row_of_TK = ids_TK * capacity + slots_TK
        num_rows = counts_E.shape[0] * capacity
    row_of_TK = row_of_TK.where(kept_TK, -1)
    sources_N = torch.arange(row_of_TK.numel(), device=row_of_TK.device)
    return row_of_TK, _by_row(sources_N, row_of_TK.flatten(), num_rows)


def token_of(source_of_R: Tensor, top_k: int) -> Tensor:
    """Return the token of each row; -1 marks an empty row."""
    if top_k == 1:
        return source_of_R
    return source_of_R.div(top_k, rounding_mode="floor")


def token_sums(probs_TE: Tensor, weights_TK: Tensor, real_T: Tensor | None) -> Tensor:
    """Return sums over tokens, [E + 1 + K] in at least fp32, for balance losses and metrics.

    The sums are each expert's probabilities, the entropy of the probabilities, and each choice's weights.
    Padding tokens (False in real_T) are left out.
    """
    wide = torch.promote_types(probs_TE.dtype, torch.float32)  # half precision cannot hold these sums
    probs_TE, weights_TK = probs_TE.to(wide), weights_TK.to(wide)
    if real_T is not None:
        real_T1 = real_T.unsqueeze(1)
        probs_TE, weights_TK = (torch.where(real_T1, values, 0.0) for values in (probs_TE, weights_TK))
    # A clamped logarithm and a dot product take half the time of torch.special.entr.
    logs_TE = probs_TE.clamp_min(torch.finfo(wide).tiny).log_()
    entropy = -torch.dot(probs_TE.flatten(), logs_TE.flatten())
    return torch.hstack([probs_TE.sum(dim=0), entropy, weights_TK.sum(dim=0)])


def load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the GShard balance loss E * sum_e share_e * mass_e / tokens, and its gradient for mass_E.

    Args:
        mass_E: the sum of each expert's probabilities over all tokens, fp32 or fp64.
        load_E: int64, the number of assignments of each expert; share_e is load_e divided by sum_e load_e.
        num_tokens: [] int64.
    """
    num_experts, dtype = len(mass_E), mass_E.dtype
    share_E = load_E.to(dtype) / load_E.sum().clamp_min(1).to(dtype)
    tokens = num_tokens.clamp_min(1).to(dtype)
    return num_experts * (share_E * mass_E).sum() / tokens, num_experts * share_E / tokens
