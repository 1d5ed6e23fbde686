"""Balance: Routing -> named scalar losses and the numbers a person looks at.

T tokens, E experts, K top_k.
"""

import math

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


def metric_names(top_k: int) -> list[str]:
    """Return the keys of `routing_metrics` for K choices."""
    names = ["entropy_gating"]
    for j in range(1, top_k + 1):
        names += [f"expert{j}_balance_top", f"expert{j}_balance_bottom"]
        names += [f"unused_expert{j}_count", f"overflow_expert{j}"]
    return names


@torch.no_grad()
def routing_metrics(routing: Decision) -> dict[str, Tensor]:
    """Meta's metrics of one micro-batch, as scalars on the device, in percent where so named.

    For choice j (from 1) with h_e = 100 * count_e / T: `expertJ_balance_top` and `_bottom` are the
    sums of the largest and smallest max(ceil(0.2 E), 1) of h, `unused_expertJ_count` the number of
    zeros, `overflow_expertJ` = 100 * dropped / assigned. `entropy_gating` is the mean token entropy
    of the gate, in nats.
    """
    num_choices, num_experts = routing.assigned_KE.shape
    tokens = routing.num_tokens.clamp_min(1)
    load_KE = (100.0 * routing.assigned_KE / tokens).sort(dim=1).values
    fifth = max(math.ceil(0.2 * num_experts), 1)
    top_K = load_KE[:, -fifth:].sum(dim=1)
    bottom_K = load_KE[:, :fifth].sum(dim=1)
    unused_K = (routing.assigned_KE == 0).sum(dim=1)
    overflow_K = 100.0 * routing.dropped_K / tokens
    entropy_T = torch.special.entr(routing.probs_TE).sum(dim=1)
    if routing.real_T is not None:
        entropy_T = entropy_T.masked_fill(~routing.real_T, 0.0)
    metrics = {"entropy_gating": entropy_T.sum() / tokens}
    for j in range(num_choices):
        metrics[f"expert{j + 1}_balance_top"] = top_K[j]
        metrics[f"expert{j + 1}_balance_bottom"] = bottom_K[j]
        metrics[f"unused_expert{j + 1}_count"] = unused_K[j]
        metrics[f"overflow_expert{j + 1}"] = overflow_K[j]
    return metrics
