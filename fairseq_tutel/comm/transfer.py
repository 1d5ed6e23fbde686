"""A trip: rows there and back over one group of ranks, their counts known, with autograd.

R rows, D model_dim, P ranks, e experts of a rank. How rows go is the subclass's: `LinearTrip`,
`HierarchicalTrip`, `PlanTrip`. Each direction is the other's inverse, and its backward. What rows look
like on the wire and how long they take is here, too: the narrow forms lose digits, the only place where
results may depend on how a layer is computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.comm import background
from fairseq_tutel.kernels.first_order import first_order

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0  # of e4m3: the largest value of a row becomes this one
SCALE_BYTES = 4


class Counts(NamedTuple):
    """Rows of every block of one exchange.

    Attributes:
        leaving_PE: [P, e] int64, from here for each expert of each rank.
        arriving_PE: [P, e], from each rank for each expert here.
        passing_LNE: [L, N, e], from each rank of this node, for this local index of each node; only a
            hierarchical trip passes through.
        crossing_PPE: [P, P, e], from each rank for each expert of each rank; only a plan asks for them.
        stamps_P: [P] int64 of each rank, where they travelled with the counts; see comm/call_id.py.
    """

    leaving_PE: Tensor
    arriving_PE: Tensor
    passing_LNE: Tensor | None = None
    crossing_PPE: Tensor | None = None
    stamps_P: Tensor | None = None

    def chunk(self, index: int, number: int) -> "Counts":
        """Return the counts of chunk `index` of `number`: every block is cut alike by all ranks."""
        if number == 1:
            return self
        all_four = (self.leaving_PE, self.arriving_PE, self.passing_LNE, self.crossing_PPE)
        chunks = (
            None if counts is None else chunk_of(counts, index, number) for counts in all_four
        )
        return Counts(*chunks)  # type: ignore[arg-type]

    def to_host(self) -> "Counts":
        """Return the same on the host, by one read."""
        if not self.leaving_PE.is_cuda:
            return self
        given = {key: c for key, c in self._asdict().items() if c is not None}
        host = torch.cat([c.reshape(-1) for c in given.values()]).cpu()
        parts = host.split([c.numel() for c in given.values()])
        return Counts(**{k: p.view(given[k].shape) for k, p in zip(given, parts, strict=True)})


def chunk_of(count: Tensor, index: int, number: int) -> Tensor:
    """Return the size of chunk `index` of `number` of a block; they differ by one at most."""
    return count * (index + 1) // number - count * index // number


def pack(rows_RD: Tensor, wire: str) -> Tensor:
    """Return what is sent for floating-point rows: [R, D] as they are or bf16, [R, D + 4] uint8 for fp8.

    A row with an infinity or NaN arrives with a NaN, never as finite numbers.
    """
    if wire == "bf16" and rows_RD.dtype.itemsize > 2:
        return rows_RD.to(torch.bfloat16)
    if wire != "fp8":
        return rows_RD
    wide_RD = rows_RD.float()
    # The smallest normal number: a row of zeros divides by it, and 1 / scale stays finite.
    smallest = torch.finfo(torch.float32).tiny * FP8_LARGEST
    scale_R1 = wide_RD.abs().amax(1, keepdim=True).clamp_min(smallest) / FP8_LARGEST
    narrow_RD = (wide_RD / scale_R1).to(FP8).view(torch.uint8)
    return torch.cat([narrow_RD, _fresh(scale_R1).view(torch.uint8)], 1)


def unpack(wire_RX: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """Return rows of `dtype` from what `pack` made of rows of that dtype."""
    if wire != "fp8":
        return wire_RX.to(dtype)
    narrow_RD = wire_RX[:, :-SCALE_BYTES].view(FP8)
    scale_R1 = _fresh(wire_RX[:, -SCALE_BYTES:]).view(torch.float32)
    return (narrow_RD.float() * scale_R1).to(dtype)


def _fresh(tensor: Tensor) -> Tensor:
    # To be viewed as another dtype, also where it has one row: strides and offset anew.
    return tensor.clone(memory_format=torch.contiguous_format)


class ExchangeTimer:
    """Milliseconds spent in row exchanges, on the host clock and, on a GPU, between CUDA events."""

    def __init__(self) -> None:
        self.cpu_ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def measure(self, rows: Tensor, collective: Callable[[], Tensor]) -> Tensor:
        """Return what `collective()` does, and add its time."""
        events = None
        if rows.is_cuda:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        start = time.perf_counter()
        came = collective()
        self.cpu_ms += 1000 * (time.perf_counter() - start)
        if events is not None:
            events[1].record()
            self._events.append(events)
        return came

    def read_and_reset(self) -> dict[str, float]:
        """Return the times since the last call; waits for the GPU, which is why it is opt-in."""
        times = {"all_to_all_cpu_time_ms": self.cpu_ms}
        if self._events:
            self._events[-1][1].synchronize()
            times["all_to_all_cuda_time_ms"] = sum(a.elapsed_time(b) for a, b in self._events)
        self.cpu_ms, self._events = 0.0, []
        return times


@dataclass(frozen=True, kw_only=True)
class Trip:
    """One exchange there and back.

    Attributes:
        wire: what rows look like on the wire; see `pack`.
        timer: adds the time of both directions, and of their backwards, where given.
        name: what an error calls it.
    """

    wire: str = "same"
    name: str = "the exchange of rows"
    timer: ExchangeTimer | None = None

    def move(self, wire_RX: Tensor, homeward: bool) -> Tensor:
        """Send and receive, without autograd."""
        raise NotImplementedError

    def travel(self, rows_RD: Tensor, homeward: bool) -> Tensor:
        """Pack, move, unpack, without autograd."""
        packed = pack(rows_RD, self.wire).contiguous()
        return unpack(self.move(packed, homeward), self.wire, rows_RD.dtype)

    def there(self, rows_RD: Tensor) -> Tensor:
        """Send rows in the order of their destination ranks; return them by source rank."""
        return _Travel.apply(rows_RD, self, False)

    def back(self, rows_RD: Tensor) -> Tensor:
        """Return rows by source rank to where they came from, in the order they were sent in."""
        return _Travel.apply(rows_RD, self, True)

    def start(self, rows_RD: Tensor, homeward: bool) -> "Started":
        """Begin `there` or `back` beside the computation."""
        flight = _Flight(self, homeward)
        return Started(_Start.apply(rows_RD, flight), flight)


class _Flight:
    """A direction of a trip that is under way: forward, and later its backward."""

    def __init__(self, trip: Trip, homeward: bool) -> None:
        self.trip, self.homeward = trip, homeward
        self.pending: list[background.Pending] = []

    def begin(self, rows: Tensor, homeward: bool) -> None:
        """Start the movement of rows."""
        trip = self.trip
        self.pending.append(background.start(lambda r: trip.travel(r, homeward), rows))

    def land(self) -> Tensor:
        """Wait, and return the rows."""
        return self.pending.pop().result()


class Started(NamedTuple):
    """What `Trip.start` returns. The token carries the graph from there to `finish`, and no numbers."""

    token: Tensor
    flight: _Flight

    def finish(self) -> Tensor:
        """Wait, and return the rows."""
        return _Finish.apply(self.token, self.flight)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip, homeward: bool) -> Tensor:
        ctx.trip, ctx.homeward = trip, homeward
        return trip.travel(rows, homeward)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.travel(drows, not ctx.homeward), None, None


class _Start(torch.autograd.Function):
    """Forward begins what `_Finish` waits for; backward waits for what `_Finish` began."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.begin(rows, flight.homeward)
        return rows.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.land(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.begin(drows, not ctx.flight.homeward)
        return drows.new_empty(0), None
