"""The table `METRICS` defines the routing metrics for logs and docs.

A metric is computed from sums over tokens (`Routing.sums`) or from assignment counts, once per micro-batch
for all layers. No metric is read on the host. Shapes use T for tokens, E for experts, K for top_k, L for
layers, S for a layer's token sums and N for a layer's metrics.
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
    """The routing counts and token sums of one layer in one micro-batch, on the device, without gradients.

    `Metric.of_counts` gets all fields stacked for L layers with equal K and E, with counts in fp32.
    """

    num_tokens: Tensor  # [] int64, the number of tokens except padding.
    assigned_KE: Tensor  # int64, the number of assignments of each choice to each expert, before dropping.
    kept_E: Tensor  # int64, each expert's number of assignments that are not dropped.
    dropped_K: Tensor  # int64, each choice's number of dropped assignments.
    sums_S: Tensor  # The sums over tokens of the metrics without `of_counts`, in the order of `METRICS`.

    @property
    def load(self) -> Tensor:
        """Each expert's number of assignments, over all choices, in L layers: [L, E]."""
        return self.assigned_KE.sum(dim=1)

    @property
    def per_token(self) -> Tensor:
        """The number of tokens, but at least 1, as the divisor of sums over tokens: [L, 1]."""
        return self.num_tokens.unsqueeze(1).clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A logged metric of a layer."""

    name: str  # The metric's key in the log. A choice's number (from 1) replaces {} in the key.
    help: str  # The metric's meaning in the docs.
    # A function that returns the metric of L layers, [L] or [L, K]. If None, the metric is a sum of
    # `RoutingCounts.sums_S` (or K sums, one per choice), divided by the number of tokens.
    of_counts: Callable[[RoutingCounts], Tensor] | None = None
    # The key under which the JSON log has a list with the metric's value for every layer. If the key is
    # empty, the log has no list.
    layers: str = ""

    def names(self, top_k: int, name: str | None = None) -> list[str]:
        """Return the metric's keys in the log: one key, or one per choice; `name` replaces `self.name`."""
        choices = range(1, top_k + 1) if "{}" in self.name else range(1)
        return [(name or self.name).format(choice) for choice in choices]


def _fifth(counts: RoutingCounts, largest: bool) -> Tensor:
    fifth = max(math.ceil(0.2 * counts.assigned_KE.shape[2]), 1)
    extreme_LKF = counts.assigned_KE.topk(fifth, largest=largest).values
    return 100 * extreme_LKF.sum(dim=2) / counts.per_token


def _overflow(counts: RoutingCounts) -> Tensor:
    # Every token has a first choice, so there are as many first choices as tokens. If experts choose
    # tokens, `dropped_K` counts the tokens that no expert chose.
    later_LK = counts.assigned_KE[:, 1:].sum(dim=2)
    asked_LK = torch.cat([counts.num_tokens.unsqueeze(1), later_LK], dim=1)
    return 100 * counts.dropped_K / asked_LK.clamp_min(1)


def _share(counts: RoutingCounts, values_L: Tensor) -> Tensor:
    return values_L / counts.load.sum(dim=1).clamp_min(1)


# The metrics entropy, balance, unused and overflow are from Meta's fairseq-moe. The metric
# moe_max_violation is MaxVio of Wang et al. 2024 (Loss-Free Balancing) plus 1.
METRICS = (
    Metric(
        name="entropy_gating", layers="entropy",
        help="entropy of the gate, in nats: from 0 to ln E",
    ),
    Metric(
        name="expert{}_weight", layers="weight{}", help="mean weight of choice J",
    ),
    Metric(
        name="expert{}_balance_top", of_counts=lambda counts: _fifth(counts, largest=True),
        help="percent of tokens whose choice J is in the busiest fifth of the experts",
    ),
    Metric(
        name="expert{}_balance_bottom", of_counts=lambda counts: _fifth(counts, largest=False),
        help="percent of tokens whose choice J is in the least busy fifth of the experts",
    ),
    Metric(
        name="overflow_expert{}", of_counts=_overflow,
        help="percent of choice J's assignments that are dropped; with --moe-choice experts, "
        "overflow_expert1 is the percent of tokens that no expert chose",
    ),
    Metric(
        name="unused_expert{}_count", of_counts=lambda counts: counts.assigned_KE.eq(0).sum(dim=2),
        help="number of experts that no token chose as choice J",
    ),
    Metric(
        name="moe_dead_experts", layers="dead_experts",
        of_counts=lambda counts: counts.load.eq(0).sum(dim=1),
        help="number of experts that no token chose",
    ),
    Metric(
        name="moe_dropped", layers="dropped", help="percent of assignments that are dropped",
        of_counts=lambda it: _share(it, 100 * (it.load - it.kept_E).sum(dim=1)),
    ),
    Metric(
        name="moe_max_violation", layers="max_violation",
        of_counts=lambda it: _share(it, it.load.shape[1] * it.load.amax(dim=1)),
        help="load of the busiest expert divided by the mean load, before dropping; this metric minus 1 "
        "is Wang et al.'s MaxVio",
    ),
)  # fmt: skip


@torch.no_grad()
def count_routing(routing: Routing) -> RoutingCounts:
    """Return the assignment counts of a routing, and the sums over its tokens."""
    return RoutingCounts(
        num_tokens=routing.num_tokens,
        assigned_KE=routing.assigned_KE,
        kept_E=routing.counts_E,
        dropped_K=routing.dropped_K,
        sums_S=routing.sums[routing.counts_E.shape[0] :],
    )


def metric_names(top_k: int) -> list[str]:
    """Return the names of all metrics of a layer with K choices, in the column order of `metric_rows`."""
    return [name for metric in METRICS for name in metric.names(top_k)]


def metric_rows(counted: Sequence[RoutingCounts]) -> tuple[Tensor, Tensor]:
    """Return the metrics [L, N] fp32 of layers with the same K, and their numbers of tokens [L, 1]."""
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

    The names, meanings and units of the metrics are in docs/flags.md.

    Example:
        >>> metrics = ft.routing_metrics(ft.route(torch.zeros(6, 4), top_k=2))
        >>> round(float(metrics["entropy_gating"]), 3)  # ln 4
        1.386
    """
    rows_LN, _ = metric_rows([count_routing(routing)])
    return dict(zip(metric_names(len(routing.dropped_K)), rows_LN[0].unbind(), strict=True))
