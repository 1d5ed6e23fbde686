"""The time of row exchanges."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ExchangeTimer:
    """Milliseconds spent in row exchanges, on the host clock and, on a GPU, between CUDA events."""

    def __init__(self) -> None:
        self.cpu_ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def measure(self, rows: Tensor, collective: Callable[[], object]) -> None:
        """Run `collective()` and add its time."""
        events = None
        if rows.is_cuda:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        start = time.perf_counter()
        collective()
        self.cpu_ms += 1000 * (time.perf_counter() - start)
        if events is not None:
            events[1].record()
            self._events.append(events)

    def read_and_reset(self) -> dict[str, float]:
        """Return the times since the last call; waits for the GPU, which is why it is opt-in."""
        times = {"all_to_all_cpu_time_ms": self.cpu_ms}
        if self._events:
            self._events[-1][1].synchronize()
            times["all_to_all_cuda_time_ms"] = sum(a.elapsed_time(b) for a, b in self._events)
        self.cpu_ms, self._events = 0.0, []
        return times
