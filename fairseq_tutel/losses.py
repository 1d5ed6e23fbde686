"""Balance: (Routing, logits) -> named scalar losses.

T tokens, E experts, K top_k.
"""

import torch
from torch import Tensor

from fairseq_tutel.routing import Assignment, Routing

Decision = Assignment | Routing


def gshard_loss(routing: Decision, logits_TE: Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e over the real tokens of one micro-batch; 0 where there is no token.

    f_e is the share of tokens whose first choice is e, before dropping (a constant); P_e is the mean
    probability of e (differentiable). 1 at uniform load and uniform probabilities.

    Source: GShard (Lepikhin et al. 2020), equation 4 and algorithm 1, scaled by E as Tutel does.
    """
    return _load_times_probability(routing, routing.assigned_KE[0])


def gshard_all_loss(routing: Decision, logits_TE: Tensor | None = None) -> Tensor:
    """The gshard loss with f_e the share of all (token, choice) pairs, not of first choices alone.

    1 at uniform load and uniform probabilities, for every K.
    """
    top_k = routing.assigned_KE.shape[0]
    return _load_times_probability(routing, routing.assigned_KE.sum(dim=0)) / top_k


def z_loss(routing: Decision, logits_TE: Tensor) -> Tensor:
    """Mean over the real tokens of (log sum_e exp logit_e)^2, which keeps the logits small.

    Source: ST-MoE (Zoph et al. 2022), equation 5.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    square_T = torch.logsumexp(logits_TE, dim=1).square()
    if routing.real_T is not None:
        square_T = square_T.masked_fill(~routing.real_T, 0.0)
    return square_T.sum() / routing.num_tokens.clamp_min(1)


def _load_times_probability(routing: Decision, assigned_E: Tensor) -> Tensor:
    num_experts = routing.probs_TE.shape[1]
    # At least fp32: a half-precision gate's dtype holds neither token counts nor their inverse.
    probs_TE = routing.probs_TE.to(torch.promote_types(routing.probs_TE.dtype, torch.float32))
    if routing.real_T is not None:
        probs_TE = probs_TE.masked_fill(~routing.real_T.unsqueeze(1), 0.0)
    tokens = routing.num_tokens.clamp_min(1).to(probs_TE.dtype)
    share_E = assigned_E.to(probs_TE.dtype) / tokens
    return num_experts * (share_E * probs_TE.sum(dim=0)).sum() / tokens


# Switch's loss (Fedus et al. 2021, equations 4 to 6) is gshard's: both count the first choice.
LOSSES = {
    "gshard": gshard_loss,
    "gshard_all": gshard_all_loss,
    "switch": gshard_loss,
    "z": z_loss,
}


def balance_losses(
    names: dict[str, float], routing: Decision, logits_TE: Tensor
) -> dict[str, Tensor]:
    """Return the scalar of every named loss; `names` maps name to weight, see parse_balance_loss."""
    return {name: LOSSES[name](routing, logits_TE) for name in names}
