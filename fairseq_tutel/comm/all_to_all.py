"""Linear all-to-all of rows, ragged or even, with autograd: its backward is its own inverse.

R rows, D model_dim, P ranks of the group.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class ExchangeTimer:
    """Milliseconds spent in row exchanges, on the host clock and, on a GPU, between CUDA events."""

    def __init__(self) -> None:
        self.cpu_ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def measure(self, rows: Tensor, collective: Any) -> None:
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


def all_to_all(
    rows_RD: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    timer: ExchangeTimer | None = None,
) -> Tensor:
    """Send the next send_counts[p] rows to rank p of the group; return what all ranks sent here.

    Args:
        rows_RD: [sum(send_counts), D], in the order of the destination ranks.
        send_counts: P host ints, rows for each rank.
        receive_counts: P host ints, rows from each rank.
        group: the process group; the backward runs on the same one.
        timer: adds the time of both directions where given.

    Returns:
        [sum(receive_counts), D], in the order of the source ranks.
    """
    return _AllToAll.apply(rows_RD, tuple(send_counts), tuple(receive_counts), group, timer)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        group: dist.ProcessGroup,
        timer: ExchangeTimer | None,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.timer = send, receive, group, timer
        return _exchange(rows, send, receive, group, timer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        back = _exchange(drows, ctx.receive, ctx.send, ctx.group, ctx.timer)
        return back, None, None, None, None


def _exchange(
    rows: Tensor,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    group: dist.ProcessGroup,
    timer: ExchangeTimer | None,
) -> Tensor:
    rows = rows.contiguous()
    out = rows.new_empty(sum(receive), *rows.shape[1:])

    def collective() -> None:
        dist.all_to_all_single(out, rows, list(receive), list(send), group=group)

    if timer is None:
        collective()
    else:
        timer.measure(rows, collective)
    return out
