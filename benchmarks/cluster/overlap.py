"""Pipelining: a step of the layer for every d, compared with its exchanges and its experts alone."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.layers import (
    BACKWARD,
    FORMS,
    SleepingExperts,
    experts_alone,
    make_layer,
    rows_arriving,
    rows_of,
    step_of,
)
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, summary
from fairseq_tutel.parallel.strategy import Strategy

# Sleeping experts that are faster and slower than the option, to either side of the exchange.
COSTS = {"compute": (1.0,), "sleep": (0.5, 1.0, 2.0)}


def overlaps(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the time of a step by d, with what bounds it; one expert a rank."""
    rank, tokens = dist.get_rank(), settings.overlap_tokens
    settings = replace(settings, hidden_dim=settings.overlap_hidden_dim)
    x_TD = rows_of(settings, tokens, rank)
    idle = make_layer(settings, settings.world_size, "sleep")
    assert isinstance(idle.experts, SleepingExperts)
    idle.experts.ms_per_row = 0.0
    for form in FORMS:
        layer = make_layer(settings, settings.world_size, form)
        number = rows_arriving(layer, step_of(layer, x_TD))
        rows_RD = torch.randn(number, settings.model_dim)
        for cost in COSTS[form]:
            if isinstance(layer.experts, SleepingExperts):
                layer.experts.ms_per_row = cost * settings.expert_ms_per_row
            steps: dict[Any, Step] = {
                "exchange": step_of(idle, x_TD),
                "experts": experts_alone(layer, rows_RD),
            }
            for d in settings.overlaps:
                steps[d] = _with_overlap(layer, x_TD, d)
            took = interleaved(steps, settings.more_repeats)
            exchange, experts = (median(took[name]) for name in ("exchange", "experts"))
            bounds = _bounds(exchange, experts)
            for d in settings.overlaps:
                speedup = median(took[1]) / median(took[d])
                yield {
                    "section": "overlap",
                    "form": form,
                    "cost": cost,
                    "tokens": tokens,
                    "exchange_seconds": exchange,
                    "experts_seconds": experts,
                    "overlap": d,
                    **summary(took[d]),
                    "speedup": speedup,
                    **{f"bound_{name}": bound for name, bound in bounds.items()},
                    **{f"share_of_{name}": speedup / bound for name, bound in bounds.items()},
                }


def _bounds(exchange: float, experts: float) -> dict[str, float]:
    """Return how much faster a step may become, by the seconds of its parts.

    Returns:
        whole: if all of a step's exchanges could run beside all of its experts.
        phases: as it is: what runs in the forward cannot run beside the backward. Each has half of the
            exchanges, and its share of the experts.
    """
    forward = experts / (1 + BACKWARD)
    phases = max(exchange / 2, forward) + max(exchange / 2, experts - forward)
    both = exchange + experts
    return {"whole": both / max(exchange, experts), "phases": both / phases}


def _with_overlap(layer: Any, x_TD: torch.Tensor, overlap: int) -> Step:
    plain = step_of(layer, x_TD)

    def step() -> None:
        layer.follow(Strategy(overlap=overlap))
        plain()

    return step
