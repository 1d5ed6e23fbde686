"""Refuses plans whose accesses to the same chunks are not ordered, by vector clocks.

A step's clock says of every lane how far it has come for sure when the step is taken. A put accesses twice,
at any time after it is asked for: its source until the wait for the next signal or the next flush is over,
its destination until that wait is. Two accesses to a chunk, one of them a write, must have one order.

Calls follow on each other without a pause, so three in a row are looked at, and `tmp` is another one in the
second. Between calls a rank's `in` and `out` are the caller's, who may write them: one step at the start of
each call, after all lanes of the rank's call before, stands for that. Three are enough: all that comes to a
rank is waited for in the same call, and what holds between two calls holds between all such.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from fairseq_tutel.planning.plan import Plan, PlanError
from fairseq_tutel.planning.plan_order import Order
from fairseq_tutel.planning.plan_shape import size_on

# The calls in which a buffer is the same; others of the three add nothing.
CALLS = {"in": (0, 1), "out": (0, 1), "tmp": (0, 2)}
Clock = tuple[int, ...]
# A step in time: its lane, its position there over all calls, and its clock.
Moment = tuple[int, int, Clock]


@dataclass(slots=True, eq=False)
class Access:
    """Of one step to chunks.

    Attributes:
        start: the moment after which it happens.
        ends: it is over after any of these (lane, position).
        number: the step; None: the caller's.
        call: in which.
    """

    start: Moment
    ends: tuple[tuple[int, int], ...]
    number: int | None
    call: int


def check_races(plan: Plan, order: Order) -> None:
    """Refuse accesses to the same chunks that nothing orders.

    Raises:
        PlanError: naming the two steps.
    """
    moments = _moments(order)
    last_write: dict[tuple[int, str, int], Access] = {}
    reads: dict[tuple[int, str, int], list[Access]] = defaultdict(list)
    for rank, buffer, first, n, writes, access in _accesses(plan, order, moments):
        for chunk in range(first, first + n):
            cell = (rank, buffer, chunk)
            before = [last_write[cell]] if cell in last_write else []
            if writes:
                before += reads.pop(cell, ())
                last_write[cell] = access
            else:
                reads[cell].append(access)
            for each in before:
                if not _ordered(each, access):
                    _refuse(plan, order, (each, access), f"{buffer}[{chunk}] of rank {rank}")


def _moments(order: Order) -> list[tuple[list[Moment], list[Moment]]]:
    """Return, call by call, the moments of the ranks' beginnings and of the steps.

    A rank's beginning has a place in each of its lanes; it is given by the first of them.
    """
    length = [1] * sum(map(len, order.rank_lanes))
    for lane in order.lanes:
        length[lane] += 1
    clocks: list[Clock] = [(-1,) * len(length)] * len(length)
    index_of = [index for _, _, index in order.sites]
    calls = []
    for call in range(3):
        begins: list[Moment] = []
        for own in order.rank_lanes:
            joined = [max(column) for column in zip(*(clocks[lane] for lane in own), strict=True)]
            for lane in own:
                joined[lane] = call * length[lane]
            for lane in own:
                clocks[lane] = tuple(joined)
            begins.append((own[0], call * length[own[0]], clocks[own[0]]))
        steps: list[Moment] = [begins[0]] * len(order.steps)
        for number in order.run:
            lane = order.lanes[number]
            if number in order.cause:
                other, position, clock = steps[order.cause[number]]
                merged = list(map(max, clocks[lane], clock))
                merged[other] = max(merged[other], position)
                clocks[lane] = tuple(merged)
            steps[number] = (lane, call * length[lane] + 1 + index_of[number], clocks[lane])
        # All of a rank's lanes are over before its next call begins.
        calls.append((begins, steps))
        for own in order.rank_lanes:
            for lane in own:
                last = list(clocks[lane])
                last[lane] = (call + 1) * length[lane] - 1
                clocks[lane] = tuple(last)
    return calls


def _accesses(
    plan: Plan, order: Order, moments: list[tuple[list[Moment], list[Moment]]]
) -> Iterator[tuple[int, str, int, int, bool, Access]]:
    """Yield (rank, buffer, first chunk, chunks, whether it writes, access), in an order that can happen."""
    for call, (begins, steps) in enumerate(moments):
        for rank, moment in enumerate(begins):
            access = Access(moment, (moment[:2],), None, call)
            for buffer in ("in", "out"):
                if call in CALLS[buffer]:
                    yield rank, buffer, 0, size_on(plan, rank, buffer), True, access
        for number in order.run:
            step, moment = order.steps[number], steps[number]
            if step.dst is None or step.n is None:
                continue
            ends: tuple[tuple[int, int], ...] = (moment[:2],)
            read_ends = ends
            target = order.ranks[number]
            if step.channel is not None:
                target = plan.channels[step.channel].target
                ends = read_ends = (steps[order.arrival[number]][:2],)
                if number in order.release:
                    read_ends = (*ends, steps[order.release[number]][:2])
            read = Access(moment, read_ends, number, call)
            write = Access(moment, ends, number, call)
            for place in step.src:
                if call in CALLS[place.buffer]:
                    yield order.ranks[number], place.buffer, place.chunk, step.n, False, read
            if call in CALLS[step.dst.buffer]:
                yield target, step.dst.buffer, step.dst.chunk, step.n, True, write


def _ordered(first: Access, second: Access) -> bool:
    """Say whether one access is over before the other can happen."""
    lane, position, clock = second.start
    return any(clock[of] >= at or (of == lane and position >= at) for of, at in first.ends)


def _refuse(plan: Plan, order: Order, pair: tuple[Access, Access], what: str) -> None:
    def name(access: Access) -> str:
        if access.number is not None:
            return order.name(access.number)
        return "the caller, before the call,"

    text = f"{name(pair[0])} and {name(pair[1])} access {what}, one writes, and nothing orders them"
    later = pair[1].call - pair[0].call
    when = ("", "; the second is of the next call", "; the second is of the call after the next")
    raise PlanError(f"Plan {plan.name!r} has a race: {text}{when[later]}.")
