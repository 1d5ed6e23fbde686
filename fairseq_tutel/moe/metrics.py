"""Metrics: Routing -> the numbers a person looks at.

What costs time, the sums over tokens, is taken layer by layer as a `Tally`; the rest is a few operations on
small tensors for all layers together. Nothing is read on the host.

T tokens, E experts, K top_k, L layers, N metrics of a layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fairseq_tutel.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What one micro-batch of a layer comes to, on the device and without a gradient.

    Attributes:
        num_tokens: [] int64, real tokens.
        assigned_KE: [K, E] int64, copies of each choice that asked for each expert.
        kept_E: [E] int64, copies that found a place.
        dropped_K: [K] int64, copies of each choice that found none.
        p_log_p: [] sum over the real tokens and all experts of p log p: minus the gate's entropy, in nats.
        weights_K: [K] sum over the real tokens of the weight of each choice.
    """

    num_tokens: Tensor
    assigned_KE: Tensor
    kept_E: Tensor
    dropped_K: Tensor
    p_log_p: Tensor
    weights_K: Tensor


def metric_names(top_k: int) -> list[str]:
    """Return the names of the N metrics of a layer with K choices, in the order of `metric_rows`."""
    choices = range(1, top_k + 1)
    return [
        "entropy_gating",
        *(f"expert{j}_weight" for j in choices),
        *(f"expert{j}_balance_top" for j in choices),
        *(f"expert{j}_balance_bottom" for j in choices),
        *(f"overflow_expert{j}" for j in choices),
        *(f"unused_expert{j}_count" for j in choices),
        "moe_dead_experts",
        "moe_dropped",
        "moe_max_violation",
    ]


@torch.no_grad()
def tally_of(routing: Routing) -> Tally:
    """Count a decision."""
    probs_TE, weights_TK = routing.probs_TE, routing.weights_TK
    # At least fp32: half precision can not hold sums over tokens.
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    probs_TE = probs_TE.to(dtype)
    if routing.real_T is not None:
        real_T1 = routing.real_T.unsqueeze(1)
        probs_TE = torch.where(real_T1, probs_TE, 0.0)
        weights_TK = torch.where(real_T1, weights_TK, 0.0)
    # A clamped logarithm and a dot product take half the time of torch.special.entr; 0 log 0 is 0.
    logs_TE = probs_TE.clamp_min(torch.finfo(dtype).tiny).log_()
    return Tally(
        num_tokens=routing.num_tokens,
        assigned_KE=routing.assigned_KE,
        kept_E=routing.counts_E,
        dropped_K=routing.dropped_K,
        p_log_p=torch.dot(probs_TE.flatten(), logs_TE.flatten()),
        # Where experts choose, a token has a column for each expert that took it.
        weights_K=weights_TK.sum(dim=0, dtype=dtype)[: len(routing.dropped_K)],
    )


def metric_rows(tallies: Sequence[Tally]) -> tuple[Tensor, Tensor]:
    """Return the metrics of layers with the same K and the real tokens that they are of.

    - entropy_gating: mean token entropy of the gate, in nats.
    - moe_dropped: percent of all copies that found their expert full.
    - moe_max_violation: load of the busiest expert over the mean load, all choices, before dropping.
    - moe_dead_experts: experts that no token chose.
    - for choice J (from 1) with h_e = 100 * count_e / T: expertJ_balance_top and _bottom are the sums
      of the largest and smallest max(ceil(0.2 E), 1) of h, unused_expertJ_count the number of zeros,
      overflow_expertJ = 100 * dropped / assigned, expertJ_weight the mean weight over tokens.

    Returns:
        rows_LN: [L, N] fp32, the columns named by `metric_names`.
        tokens_L1: [L, 1] fp32.

    Source: Meta's fairseq-moe for entropy, balance, unused and overflow; Wang et al. 2024 (Loss-Free
    Balancing) for the violation, which is theirs plus 1.
    """
    same = groupby(tallies, key=lambda tally: tally.assigned_KE.shape)
    parts = [_rows(list(layers)) for _, layers in same]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([rows for rows, _ in parts]), torch.cat([tokens for _, tokens in parts])


def _rows(tallies: list[Tally]) -> tuple[Tensor, Tensor]:
    assigned_LKE = torch.stack([tally.assigned_KE for tally in tallies]).float()
    kept_LE = torch.stack([tally.kept_E for tally in tallies])
    dropped_LK = torch.stack([tally.dropped_K for tally in tallies])
    entropy_L = -torch.stack([tally.p_log_p for tally in tallies])
    weights_LK = torch.stack([tally.weights_K for tally in tallies])
    tokens_L1 = torch.stack([tally.num_tokens for tally in tallies]).float().unsqueeze(1)
    at_least_1_L1 = tokens_L1.clamp_min(1)

    num_experts = assigned_LKE.shape[2]
    fifth = max(math.ceil(0.2 * num_experts), 1)
    top_LKF = assigned_LKE.topk(fifth).values
    bottom_LKF = assigned_LKE.topk(fifth, largest=False).values
    balance_LB = 100 * torch.cat([top_LKF, bottom_LKF], dim=1).sum(dim=2)  # B is 2 K
    # Everybody makes a first choice; where experts choose, its dropped ones are tokens that none took.
    asked_LK = torch.cat([tokens_L1, assigned_LKE[:, 1:].sum(dim=2)], dim=1)
    load_LE = assigned_LKE.sum(dim=1)
    copies_L1 = load_LE.sum(dim=1, keepdim=True)
    lost_L1 = copies_L1 - kept_LE.sum(dim=1, keepdim=True)
    busiest_L1 = load_LE.amax(dim=1, keepdim=True)
    zeros_LJ = torch.cat([assigned_LKE, load_LE.unsqueeze(1)], dim=1).eq(0).sum(dim=2)  # J is K + 1
    columns = [
        torch.cat([entropy_L.unsqueeze(1), weights_LK, balance_LB], dim=1) / at_least_1_L1,
        100 * dropped_LK / asked_LK.clamp_min(1),
        zeros_LJ,
        torch.cat([100 * lost_L1, num_experts * busiest_L1], dim=1) / copies_L1.clamp_min(1),
    ]
    return torch.cat(columns, dim=1).float(), tokens_L1


def routing_metrics(routing: Routing) -> dict[str, Tensor]:
    """Return the metrics of one micro-batch by name, as scalars on the device; see `metric_rows`."""
    rows_LN, _ = metric_rows([tally_of(routing)])
    return dict(zip(metric_names(len(routing.dropped_K)), rows_LN[0].unbind(), strict=True))
