"""The metrics of routing, in one table, `METRICS`, which defines logs and docs.

A metric is either a mean over tokens, whose sum each layer computes in its forward, or a function of the
counts of assignments, computed once per micro-batch for all layers. Nothing is read on the host.
T tokens, E experts, K top_k, L layers, S sums of a layer, N metrics of a layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.moe.routing import Routing


class RoutingCounts(NamedTuple):
    """Routing counts and token sums of one layer in one micro-batch, on the device, without gradients.

    For `Metric.of_counts`, every field has a first dimension for L layers with the same K and E, and counts
    are in fp32.
    """

    num_tokens: Tensor  # [] int64, real tokens
    assigned_KE: Tensor  # int64, assignments of each choice to each expert, dropped or not
    kept_E: Tensor  # int64, assignments that got a slot
    dropped_K: Tensor  # int64, assignments of each choice that got no slot
    sums_S: Tensor  # the sums over tokens of `METRICS`, in their order

    @property
    def load(self) -> Tensor:
        """The assignments of all choices to each expert of L layers, [L, E]."""
        return self.assigned_KE.sum(dim=1)

    @property
    def per_token(self) -> Tensor:
        """The divisor of sums over tokens, at least 1, [L, 1]."""
        return self.num_tokens.unsqueeze(1).clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A logged number of a layer; either `token_sum` or `of_counts` is set and computes the number."""

    name: str  # key in the log; for per-choice metrics, {} is replaced by the choice, from 1
    help: str  # row in the docs
    # Returns the sum over real tokens, [] or [K] (K = 1: [] or [1]). Arguments: probs_TE and weights_TK, in
    # at least fp32 with zeros for padding, and real_T. The metric is its mean over real tokens.
    token_sum: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    of_counts: Callable[[RoutingCounts], Tensor] | None = None  # the metric by layer, [L] or [L, K]
    layers: str = ""  # name of the list over layers in the JSON log; empty: no list is logged

    def names(self, top_k: int, name: str | None = None) -> list[str]:
        """Return the metric's log names: one name, or one per choice; `name` replaces `self.name`."""
        choices = range(1, top_k + 1) if self.is_per_choice else range(1)
        return [(name or self.name).format(choice) for choice in choices]

    @property
    def is_per_choice(self) -> bool:
        """Whether the metric has one value for each choice of a token."""
        return "{}" in self.name


def _entropies(probs_TE: Tensor, weights_TK: Tensor, real_T: Tensor | None) -> Tensor:
    # A clamped logarithm and a dot product take half the time of torch.special.entr; 0 log 0 is 0.
    logs_TE = probs_TE.clamp_min(torch.finfo(probs_TE.dtype).tiny).log_()
    return -torch.dot(probs_TE.flatten(), logs_TE.flatten())


def _fifth(counts: RoutingCounts, largest: bool) -> Tensor:
    fifth = max(math.ceil(0.2 * counts.assigned_KE.shape[2]), 1)
    extreme_LKF = counts.assigned_KE.topk(fifth, largest=largest).values
    return 100 * extreme_LKF.sum(dim=2) / counts.per_token


def _overflow(counts: RoutingCounts) -> Tensor:
    # Every token has a first choice. With expert choice, a token without an expert counts as dropped.
    later_LK = counts.assigned_KE[:, 1:].sum(dim=2)
    asked_LK = torch.cat([counts.num_tokens.unsqueeze(1), later_LK], dim=1)
    return 100 * counts.dropped_K / asked_LK.clamp_min(1)


def _share(counts: RoutingCounts, values_L: Tensor) -> Tensor:
    return values_L / counts.load.sum(dim=1).clamp_min(1)


# Sources: Meta's fairseq-moe for entropy, balance, unused and overflow; Wang et al. 2024 (Loss-Free
# Balancing) for the violation, to which 1 is added here.
METRICS = (
    Metric(
        name="entropy_gating", layers="entropy", token_sum=_entropies,
        help="entropy of the gate, in nats: from 0 to ln E",
    ),
    Metric(
        name="expert{}_weight", layers="weight{}",
        token_sum=lambda _, weights_TK, real_T: weights_TK.sum(dim=0),
        help="mean weight of choice J",
    ),
    Metric(
        name="expert{}_balance_top", of_counts=lambda counts: _fifth(counts, largest=True),
        help="percent of tokens at the busiest fifth of the experts",
    ),
    Metric(
        name="expert{}_balance_bottom", of_counts=lambda counts: _fifth(counts, largest=False),
        help="percent of tokens at the least busy fifth of the experts",
    ),
    Metric(
        name="overflow_expert{}", of_counts=_overflow,
        help="percent of dropped assignments of choice J; with --moe-choice experts, choice 1 is the "
        "percent of tokens that no expert chose",
    ),
    Metric(
        name="unused_expert{}_count", of_counts=lambda counts: counts.assigned_KE.eq(0).sum(dim=2),
        help="experts that no token chose as choice J",
    ),
    Metric(
        name="moe_dead_experts", layers="dead_experts",
        of_counts=lambda counts: counts.load.eq(0).sum(dim=1),
        help="experts that no token chose",
    ),
    Metric(
        name="moe_dropped", layers="dropped", help="percent of dropped assignments",
        of_counts=lambda it: _share(it, 100 * (it.load - it.kept_E).sum(dim=1)),
    ),
    Metric(
        name="moe_max_violation", layers="max_violation",
        of_counts=lambda it: _share(it, it.load.shape[1] * it.load.amax(dim=1)),
        help="load of the busiest expert over the mean load, before dropping; 1 is even, and Wang et al.'s "
        "MaxVio is this minus 1",
    ),
)  # fmt: skip


@torch.no_grad()
def count_routing(routing: Routing) -> RoutingCounts:
    """Count the assignments of a routing and sum its per-token values, for the metrics."""
    top_k = len(routing.dropped_K)
    # At least fp32: half precision can not hold sums over tokens.
    dtype = torch.promote_types(routing.probs_TE.dtype, torch.float32)
    # With expert choice, a token has more weights than K: one for each expert that chose it.
    probs_TE, weights_TK = routing.probs_TE.to(dtype), routing.weights_TK[:, :top_k]
    if routing.real_T is not None:
        real_T1 = routing.real_T.unsqueeze(1)
        probs_TE = torch.where(real_T1, probs_TE, 0.0)
        weights_TK = torch.where(real_T1, weights_TK, 0.0)
    weights_TK, real_T = weights_TK.to(dtype), routing.real_T
    sums = [m.token_sum(probs_TE, weights_TK, real_T) for m in METRICS if m.token_sum is not None]
    return RoutingCounts(
        num_tokens=routing.num_tokens,
        assigned_KE=routing.assigned_KE,
        kept_E=routing.counts_E,
        dropped_K=routing.dropped_K,
        sums_S=torch.hstack(sums),
    )


def metric_names(top_k: int) -> list[str]:
    """Return the names of all metrics of a layer with K choices, in the order of `metric_rows`."""
    return [name for metric in METRICS for name in metric.names(top_k)]


def metric_rows(counted: Sequence[RoutingCounts]) -> tuple[Tensor, Tensor]:
    """Return the metrics [L, N] in fp32 of layers with the same K, and their real tokens' counts [L, 1]."""
    same = groupby(counted, key=lambda counts: counts.assigned_KE.shape)
    parts = [_rows(list(layers)) for _, layers in same]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([rows for rows, _ in parts]), torch.cat([tokens for _, tokens in parts])


def _rows(counted: list[RoutingCounts]) -> tuple[Tensor, Tensor]:
    *counts_of, sums_LS = (torch.stack(tensors) for tensors in zip(*counted, strict=True))
    counts = RoutingCounts._make([*(tensor.float() for tensor in counts_of), sums_LS])
    summed = [metric for metric in METRICS if metric.of_counts is None]
    widths = [len(metric.names(counts.assigned_KE.shape[1])) for metric in summed]
    means = iter((sums_LS / counts.per_token).split(widths, dim=1))
    columns = [
        next(means) if metric.of_counts is None else metric.of_counts(counts).view(len(counted), -1)
        for metric in METRICS
    ]
    return torch.cat(columns, dim=1).float(), counts.num_tokens.unsqueeze(1)


def routing_metrics(routing: Routing) -> dict[str, Tensor]:
    """Return the metrics of one micro-batch by name, as fp32 scalars on the device.

    docs/flags.md lists their names, meanings and units.

    Example:
        >>> metrics = ft.routing_metrics(ft.route(torch.zeros(6, 4), top_k=2))
        >>> round(float(metrics["entropy_gating"]), 3)  # ln 4
        1.386
    """
    rows_LN, _ = metric_rows([count_routing(routing)])
    return dict(zip(metric_names(len(routing.dropped_K)), rows_LN[0].unbind(), strict=True))
