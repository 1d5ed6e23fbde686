"""Time of a step on all ranks: from a barrier to the last rank's end."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], object]


def seconds_of(step: Step) -> float:
    """Run a step once on every rank; return the seconds of the slowest, the same on all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    return largest(time.perf_counter() - begin)


def largest(number: float) -> float:
    """Return the largest of all ranks' numbers."""
    value = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def interleaved(steps: Mapping[Any, Step], repeats: int) -> dict[Any, list[float]]:
    """Run every step once unmeasured, then all in turn, so that a slow moment hits all of them.

    Returns:
        `repeats` times of each, in seconds.
    """
    for step in steps.values():
        seconds_of(step)
    took: dict[Any, list[float]] = {key: [] for key in steps}
    for _ in range(repeats):
        for key, step in steps.items():
            took[key].append(seconds_of(step))
    return took


def summary(times: list[float]) -> dict[str, float | int]:
    """Return median, extremes and number of times, as a row has them."""
    return {
        "seconds": median(times),
        "seconds_min": min(times),
        "seconds_max": max(times),
        "repeats": len(times),
    }
