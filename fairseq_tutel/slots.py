"""Slots: every copy's place in its expert's buffer, by counting those that come before it.

T tokens, E experts, K top_k, N = K * T copies: copy j * T + t is token t's choice j.
"""

import torch
from torch import Tensor


def asking_ids(
    expert_ids_TK: Tensor, num_experts: int, real_T: Tensor | None, asked_TK: Tensor | None
) -> Tensor:
    """Return ids_KT, contiguous: the expert that each copy asks for, E for copies that ask for none."""
    ids_KT = expert_ids_TK.t()
    if real_T is not None:
        ids_KT = torch.where(real_T, ids_KT, num_experts)
    if asked_TK is not None:
        ids_KT = torch.where(asked_TK.t(), ids_KT, num_experts)
    return ids_KT.contiguous()


def assign_slots(
    ids_KT: Tensor, num_experts: int, time_first: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Number the copies of each expert: all first choices before all second ones, then token order.

    Args:
        ids_KT: [K, T] int64, the expert that each copy asks for; E for none.
        num_experts: E.
        time_first: see `MicroBatch`.

    Returns:
        slots_TK: [T, K] int64, -1 for copies that ask for nothing.
        assigned_KE: [K, E] int64, how many tokens made e their j-th choice.
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


def sentence_order(
    num_tokens: int, time_first: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return the tokens [T] int64 in (sentence, time) order."""
    tokens_T = torch.arange(num_tokens, device=device)
    return tokens_T if time_first is None else tokens_T.view(time_first).t().reshape(-1)


def assign_slots_by(order_N: Tensor, ids_KT: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Number the copies of each expert in a given order; returns what `assign_slots` does.

    Args:
        order_N: [K * T] int64, the copies in the order in which they take slots; copy j * T + t is
            token t's choice j.
        ids_KT: [K, T] int64, the expert that each copy asks for; E for none.
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
