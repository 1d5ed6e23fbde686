"""A run in a row of numbers."""

# ruff: noqa: RUF001 - dashes and crosses are meant

import math
from collections import Counter
from statistics import median

from fairseq_tutel.tools.training_log import Record, Run

NOTHING = "–"


def summary_row(name: str, run: Run) -> dict[str, str]:
    """Return the cells of a run by their headings; perplexities are of one validation subset."""
    subset = "valid" if "valid" in run.subsets else next(iter(run.subsets), "valid")
    perplexities = _finite(run.subsets.get(subset, []), "ppl")
    suffix = "" if subset == "valid" else f" ({subset})"
    best = min(perplexities, key=lambda point: point[1], default=None)
    speeds = [speed for _, speed in _finite(run.training, "wps")]
    speeds = speeds[1:] or speeds  # the first updates warm up
    return {
        "Run": name,
        "Updates": f"{run.last_update:,}",
        "Training perplexity, last": _last(_finite(run.training, "ppl")),
        "Validation perplexity, last": _last(perplexities) + suffix,
        "Validation perplexity, best": (
            NOTHING if best is None else f"{best[1]:.2f} at update {best[0]:,}{suffix}"
        ),
        "Tokens per second, median": f"{median(speeds):,.0f}" if speeds else NOTHING,
        "Training time": duration(run.seconds),
        "MoE layers × experts": _layers(run),
        "Ranks": ", then ".join(map(str, run.ranks)) or NOTHING,
    }


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if math.isnan(seconds):
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _layers(run: Run) -> str:
    layers = Counter(run.experts.values())
    if layers:
        return ", ".join(f"{count} × {experts}" for experts, count in layers.items())
    is_moe = any("moe_gate_loss" in record.values for record in run.training)
    return "not logged" if is_moe else "none"


def _finite(records: list[Record], key: str) -> list[tuple[int, float]]:
    """Return (update, value) where a finite number of that key was logged."""
    points = [(record.update, record.values.get(key, math.nan)) for record in records]
    return [(update, value) for update, value in points if math.isfinite(value)]


def _last(points: list[tuple[int, float]]) -> str:
    return f"{points[-1][1]:.2f}" if points else NOTHING
