"""Metrics: Routing -> the numbers a person looks at, as scalars on the device.

T tokens, E experts, K top_k.
"""

import math

import torch
from torch import Tensor

from fairseq_tutel.routing import Assignment, Routing

Decision = Assignment | Routing


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
