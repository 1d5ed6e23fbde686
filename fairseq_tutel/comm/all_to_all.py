"""Linear all-to-all of rows, ragged or even, with autograd: its backward is its own inverse.

R rows, D model_dim, P ranks of the group.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class LinearTrip:
    """One exchange there and back, its counts known: every rank sends to every other."""

    group: dist.ProcessGroup
    send: tuple[int, ...]
    receive: tuple[int, ...]
    timer: ExchangeTimer | None = None

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank, or stay on it."""
        return sum(self.send)

    def there(self, rows_RD: Tensor) -> Tensor:
        """Send rows in the order of their destination ranks; return them by source rank."""
        return all_to_all(rows_RD, self.send, self.receive, self.group, self.timer)

    def back(self, rows_RD: Tensor) -> Tensor:
        """Return rows by source rank to where they came from, in the order they were sent in."""
        return all_to_all(rows_RD, self.receive, self.send, self.group, self.timer)


def open_trip(
    counts_PE: Tensor, group: dist.ProcessGroup, timer: ExchangeTimer | None = None
) -> tuple[LinearTrip, Tensor, list[list[int]]]:
    """Exchange counts and plan the rows' trip by them. Collective; one host read.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the group.
        group: the ranks.
        timer: of the rows' exchanges.

    Returns:
        trip: to send rows by.
        arriving_PE: [P, e] int64, rows from each rank for each expert here.
        arriving: the same on the host.
    """
    arriving_PE = torch.empty_like(counts_PE)
    dist.all_to_all_single(arriving_PE, counts_PE.contiguous(), group=group)
    leaving, arriving = torch.stack([counts_PE, arriving_PE]).tolist()
    send, receive = (tuple(sum(row) for row in rows) for rows in (leaving, arriving))
    return LinearTrip(group=group, send=send, receive=receive, timer=timer), arriving_PE, arriving


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
        return exchange_rows(rows, send, receive, group, timer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        back = exchange_rows(drows, ctx.receive, ctx.send, ctx.group, ctx.timer)
        return back, None, None, None, None


def exchange_rows(
    rows: Tensor,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    group: dist.ProcessGroup,
    timer: ExchangeTimer | None,
) -> Tensor:
    """Send and receive rows by their counts, without autograd."""
    rows = rows.contiguous()
    out = rows.new_empty(sum(receive), *rows.shape[1:])

    def collective() -> None:
        dist.all_to_all_single(out, rows, list(receive), list(send), group=group)

    if timer is None:
        collective()
    else:
        timer.measure(rows, collective)
    return out
