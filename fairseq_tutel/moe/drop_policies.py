"""Drop policies: the order in which copies take their expert's places; who comes last is dropped first.

T tokens, E experts, K top_k, N = K * T copies: copy j * T + t is token t's choice j.
"""

import torch
from torch import Tensor

POLICIES = ("position", "bpr", "rts", "probability")


def slot_order(
    policy: str, probs_TE: Tensor, expert_ids_TK: Tensor, position_T: Tensor, training: bool
) -> Tensor:
    """Return the copies [N] int64 in the order in which they take places.

    Args:
        policy: position: first choices before second ones, then the order of `position_T`. bpr
            (batch-prioritised routing): the same, but tokens by their largest probability, largest
            first. rts (random token selection): the same, but tokens in a random order drawn for every
            choice; by position outside training. probability: all copies by the probability of their
            own expert, largest first, whatever choice they are.
        probs_TE: [T, E], detached.
        expert_ids_TK: [T, K] int64, the experts of each token.
        position_T: [T] int64, the tokens in (sentence, time) order.
        training: whether to draw from torch's global generator.

    Ties keep the order of `position`.

    Source: BPR: Riquelme et al. 2021, section 4; RTS: Rajbhandari et al. 2022 (DeepSpeed-MoE).
    """
    num_tokens, top_k = expert_ids_TK.shape
    if policy == "bpr":
        importance_T = probs_TE.amax(dim=1)[position_T]
        position_T = position_T[importance_T.argsort(descending=True, stable=True)]
    order_KT = position_T.expand(top_k, num_tokens)
    if policy == "rts" and training:
        # In half precision many draws would be equal, and ties go to the earlier token.
        keys_KT = torch.rand(top_k, num_tokens, device=position_T.device, dtype=torch.float32)
        order_KT = keys_KT.argsort(dim=1)
    first_K1 = torch.arange(top_k, device=position_T.device).unsqueeze(1) * num_tokens
    order_N = (order_KT + first_K1).flatten()
    if policy == "probability":
        probs_N = probs_TE.gather(1, expert_ids_TK).t().flatten()[order_N]
        order_N = order_N[probs_N.argsort(descending=True, stable=True)]
    return order_N
