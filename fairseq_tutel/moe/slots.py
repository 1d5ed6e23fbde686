"""Slots: which copies ask for a place, and in which order; the kernel `assign_slots` numbers them.

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


def sentence_order(
    num_tokens: int, time_first: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return the tokens [T] int64 in (sentence, time) order."""
    tokens_T = torch.arange(num_tokens, device=device)
    return tokens_T if time_first is None else tokens_T.view(time_first).t().reshape(-1)
