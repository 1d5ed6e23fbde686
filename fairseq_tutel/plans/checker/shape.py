"""Finds malformed steps of a collective plan without running the plan.

In a plan that passes, all chunks are inside their buffers, and only one lane uses each end of a channel.
The k-th signal of a channel has a k-th wait, and a signal follows each put.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NoReturn

from fairseq_tutel.plans.format import BUFFERS, Plan, PlanError, Step

# All buffers of a plan together may have at most this number of chunks. Checking a plan with 2 ranks and
# this number of chunks takes 11 s and 541 MiB.
MOST = 1 << 20
# This table maps each operation on a channel to the end of the channel whose rank runs the operation.
ENDS = {"put": "source", "signal": "source", "flush": "source", "wait": "target"}
# Each entry has two matching operations and the field in which they must agree.
PAIRS = (("signal", "wait", "channel"), ("post", "pend", "semaphore"))


def site(rank: int, lane: int, index: int) -> str:
    """Return the position of a step for an error message, such as "rank 0, lane 0, step 2"."""
    return f"rank {rank}, lane {lane}, step {index}"


def check_shape(plan: Plan) -> None:
    """Raise PlanError if a plan is malformed. The error names the field, or the rank, lane and step."""
    _check_head(plan)
    for rank, lane, index, step in plan.steps():
        wrong = next(_wrong_in(plan, rank, step), None)
        if wrong:
            _refuse(plan, f"{site(rank, lane, index)} ({step.op}) {wrong}")
    _check_lanes(plan)
    _check_pairs(plan)


def _check_head(plan: Plan) -> None:
    if len(plan.programs) != plan.ranks:
        _refuse(plan, f"it has {len(plan.programs)} programs for {plan.ranks} ranks; give one per rank")
    cells = plan.ranks * sum(map(plan.size_of, BUFFERS))
    if cells > MOST:
        _refuse(plan, f"the buffers of all ranks have {cells} chunks; the limit is {MOST}")
    if plan.max_bytes is not None and plan.max_bytes < plan.min_bytes:
        _refuse(plan, f"its byte range is empty: {plan.min_bytes} to {plan.max_bytes} bytes")
    for index, channel in enumerate(plan.channels):
        ends = (channel.source, channel.target)
        if not all(0 <= end < plan.ranks for end in ends) or ends[0] == ends[1]:
            text = f"channel {index} leads from rank {ends[0]} to rank {ends[1]}"
            _refuse(plan, f"{text}, but must join two different ranks below {plan.ranks}")


def _wrong_in(plan: Plan, rank: int, step: Step) -> Iterator[str]:
    """Yield a text for each problem of a step. The text continues a sentence that begins with the step."""
    target = rank
    if step.op in ENDS:
        if step.channel is None or not 0 <= step.channel < len(plan.channels):
            yield f"uses channel {step.channel}, but the plan has {len(plan.channels)} channels"
            return
        channel = plan.channels[step.channel]
        end = getattr(channel, ENDS[step.op])
        if end != rank:
            text = f"uses channel {step.channel} from rank {channel.source} to rank {channel.target}"
            yield f"{text}, where only rank {end} may do this"
        target = channel.target
    if step.dst is None:
        return
    sources = len(step.src)
    if step.n < 1:
        yield "has no chunks"
    # A sum has at most one term from each rank.
    if sources != 1 if step.op != "reduce" else not 2 <= sources <= max(2, plan.ranks):
        yield f"has {sources} sources; a put or copy has 1, a reduce has 2 or more, at most 1 for each rank"
        return
    for owner, place in [*((rank, each) for each in step.src), (target, step.dst)]:
        size = plan.size_of(place.buffer)
        if place.chunk < 0 or place.chunk + step.n > size:
            yield f"goes beyond the {size} chunks of {place.buffer} on rank {owner}"
    if step.dst.buffer == "in":
        yield "writes to the buffer `in`, which is read-only"
    for index, place in enumerate(step.src):
        in_place = step.op == "reduce" and index == 0 and place == step.dst
        overlap = place.buffer == step.dst.buffer and abs(place.chunk - step.dst.chunk) < step.n
        if step.op != "put" and not in_place and overlap:
            yield "writes to chunks that it reads"


def _check_lanes(plan: Plan) -> None:
    """Raise PlanError if two lanes use the same end of a channel or of a semaphore."""
    owner: dict[tuple[str, int, int | None], int] = {}
    for rank, lane, index, step in plan.steps():
        if step.op in ENDS:
            what, key = f"channel {step.channel}", (ENDS[step.op], rank, step.channel)
        elif step.op in ("post", "pend"):
            what, key = f"semaphore {step.semaphore}", (step.op, rank, step.semaphore)
        else:
            continue
        first = owner.setdefault(key, lane)
        if first != lane:
            text = f"{site(rank, lane, index)} ({step.op}) uses {what}, which lane {first} also uses"
            _refuse(plan, f"{text}; use it in one lane of each rank")


def _check_pairs(plan: Plan) -> None:
    """Raise PlanError unless each put has a later signal, each signal a wait, and each post a pend."""
    sites: dict[tuple[str, int, int | None], list[str]] = defaultdict(list)
    open_puts: dict[int | None, str] = {}
    for rank, lane, index, step in plan.steps():
        where = site(rank, lane, index)
        if step.op == "put":
            open_puts[step.channel] = where
        if step.op == "signal":
            open_puts.pop(step.channel, None)
        for *pair, field in PAIRS:
            if step.op in pair:
                of = rank if field == "semaphore" else -1
                sites[step.op, of, getattr(step, field)].append(where)
    for channel, where in open_puts.items():
        _refuse(plan, f"{where} (put) has no signal after it on channel {channel}")
    for first, second, field in PAIRS:
        for op, of, number in list(sites):
            if op not in (first, second):
                continue
            given, taken = sites[first, of, number], sites[second, of, number]
            if len(given) != len(taken):
                last = max(given, taken, key=len)[-1]
                text = f"{field} {number} has {len(given)} {first}s and {len(taken)} {second}s"
                _refuse(plan, f"{last}: {text}; give equal numbers")


def _refuse(plan: Plan, what: str) -> NoReturn:
    raise PlanError(f"Plan {plan.name!r} is malformed: {what}.")
