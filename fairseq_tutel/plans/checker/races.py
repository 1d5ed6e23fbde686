"""Finds the races of a collective plan with vector clocks.

If two steps access a chunk and one of them writes, but their order is not fixed, the plan has a race.
The vector clock of a lane has, for each lane, the number of steps that have certainly ended. A lane's
vector clock changes only when the lane waits. The clock of a signal is its lane's vector clock together
with this lane's current step count. A put may access its source and destination at any time after its lane
has run the put. The write has certainly ended when the receiving rank has waited for the channel's first
signal after the put. The read has ended at the same time, or after the channel's next flush.

Calls of a plan follow each other without a pause, so three calls in a row are checked. The second of the
three calls uses the other `tmp` buffer. Between calls, the caller may write a rank's `in` and `out`. The
check treats these writes as one step of the rank between two calls.
Three calls in a row are enough, because each call on a rank waits for data from all ranks.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.format import Plan, PlanError

# For each buffer, two calls that use the same memory are checked. More calls would find no more races.
CALLS = {"in": (0, 1), "out": (0, 1), "tmp": (0, 2)}
Counts = np.ndarray[Any, np.dtype[np.int32]]


class Clock(NamedTuple):
    """The vector clock of a lane: its own `taken` steps, and the ended steps of the other lanes."""

    lane: int
    taken: int
    others: Counts  # These counts are never modified.

    def has(self, lane: int, count: int) -> bool:
        """Return whether `count` steps of the lane `lane` have certainly ended."""
        return bool((self.taken if lane == self.lane else self.others.item(lane)) >= count)

    def joined(self, other: "Clock") -> Counts:
        """Return the elementwise maximum of this vector clock and another vector clock."""
        if self.has(other.lane, other.taken):
            return self.others
        counts = np.maximum(self.others, other.others)
        counts[other.lane] = other.taken
        return counts


class Access(NamedTuple):
    """A read or write of chunks by a step of a plan, or by the plan's caller if `number` is None.

    The access has ended when, for at least one (lane, count) in `ends`, the lane has run `count` steps.
    """

    ends: tuple[tuple[int, int], ...]
    number: int | None
    call: int


def check_races(plan: Plan, order: Order) -> None:
    """Raise PlanError if two steps access a chunk in no fixed order and one of the steps writes."""
    last_write: dict[tuple[int, str, int], Access] = {}
    reads: dict[tuple[int, str, int], list[Access]] = defaultdict(list)
    for rank, buffer, first, n, writes, access, clock in _accesses(plan, order):
        for chunk in range(first, first + n):
            cell = (rank, buffer, chunk)
            before = [last_write[cell]] if cell in last_write else []
            if writes:
                before += reads.pop(cell, ())
                last_write[cell] = access
            else:
                reads[cell].append(access)
            for each in before:
                if not any(clock.has(lane, count) for lane, count in each.ends):
                    _refuse(plan, order, (each, access), f"{buffer}[{chunk}] of rank {rank}")


def _accesses(plan: Plan, order: Order) -> Iterator[tuple[int, str, int, int, bool, Access, Clock]]:
    """Yield all reads and writes of chunks in three calls of a plan, in one possible order.

    An item is (rank, buffer, first chunk, number of chunks, whether the access writes, access, clock at the
    access's start). The start of a call counts as one step of each lane of the rank. This clock
    already counts the step that makes the access.
    """
    length = [1] * sum(map(len, order.rank_lanes))
    for lane in order.lanes:
        length[lane] += 1
    causes = set(order.cause.values())
    counts = [0] * len(length)
    known: list[Counts] = [np.zeros(len(length), np.int32)] * len(length)

    def end(number: int, call: int) -> tuple[int, int]:
        lane = order.lanes[number]
        return lane, call * length[lane] + 2 + order.sites[number][2]

    for call in range(3):
        for rank, own in enumerate(order.rank_lanes):
            joined = np.maximum.reduce([known[lane] for lane in own])
            for lane in own:
                counts[lane] += 1
                joined[lane] = counts[lane]
            begun = Clock(own[0], counts[own[0]], joined)
            access = Access(((own[0], counts[own[0]]),), None, call)
            for buffer in ("in", "out"):
                if call in CALLS[buffer]:
                    yield rank, buffer, 0, plan.size_of(buffer), True, access, begun
            for lane in own:
                known[lane] = joined
        sent: dict[int, Clock] = {}  # The clock after each signal or post.
        for number in order.run:
            step, rank, lane = order.steps[number], order.sites[number][0], order.lanes[number]
            if number in order.cause:
                clock = Clock(lane, counts[lane], known[lane])
                known[lane] = clock.joined(sent.pop(order.cause[number]))
            counts[lane] += 1
            clock = Clock(lane, counts[lane], known[lane])
            if step.dst is not None:
                ends: tuple[tuple[int, int], ...] = (end(number, call),)
                read_ends, target = ends, plan.target_of(rank, step)
                if step.channel is not None:
                    ends = read_ends = (end(order.arrival[number], call),)
                    if number in order.release:
                        read_ends = (*ends, end(order.release[number], call))
                read, write = Access(read_ends, number, call), Access(ends, number, call)
                for place in step.src:
                    if call in CALLS[place.buffer]:
                        yield rank, place.buffer, place.chunk, step.n, False, read, clock
                if call in CALLS[step.dst.buffer]:
                    yield target, step.dst.buffer, step.dst.chunk, step.n, True, write, clock
            if number in causes:
                sent[number] = clock


def _refuse(plan: Plan, order: Order, pair: tuple[Access, Access], what: str) -> None:
    def name(access: Access) -> str:
        if access.number is not None:
            return order.name(access.number)
        return "the caller (before the call)"

    text = f"{name(pair[0])} and {name(pair[1])} access {what} without a fixed order, and one writes"
    later = pair[1].call - pair[0].call
    when = ("", "; the second step is in the next call", "; the second step is two calls later")
    raise PlanError(f"Plan {plan.name!r} has a race: {text}{when[later]}.")
