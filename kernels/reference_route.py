"""The routing kernels in plain torch: softmax with top-k, and the assignment of slots.

T tokens, E experts, K top_k, N = K * T assignments, where j * T + t is choice j of token t.
"""

import math

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


def softmax_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax and each token's K largest probabilities: (probs_TE, ids_TK, weights_TK).

    The ids are the ids of `choose_experts`.

    Args:
        logits_TE: [T, E], any float dtype, which is also the dtype of probs and weights. If a row has a NaN
            or +inf, all its probabilities are NaN, and its ids are 0 .. K - 1.
        top_k: K, from 1 to E.
    """
    probs_TE = torch.softmax(logits_TE, dim=1)
    ids_TK = choose_experts(probs_TE, top_k)
    return probs_TE, ids_TK, probs_TE.gather(1, ids_TK)


def softmax_top_k_backward(
    probs_TE: Tensor, ids_TK: Tensor, dprobs_TE: Tensor | None, dweights_TK: Tensor | None
) -> Tensor:
    """Return the gradient of the logits in `softmax_top_k`; an output gradient of None means zeros."""
    wide = torch.promote_types(probs_TE.dtype, torch.float32)
    grads_TE = torch.zeros_like(probs_TE, dtype=wide) if dprobs_TE is None else dprobs_TE.to(wide)
    if dweights_TK is not None:
        grads_TE = grads_TE.scatter_add(1, ids_TK, dweights_TK.to(wide))
    wide_TE = probs_TE.to(wide)
    dots_T1 = (wide_TE * grads_TE).sum(dim=1, keepdim=True)
    return (wide_TE * (grads_TE - dots_T1)).to(probs_TE.dtype)


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
