"""Check of shape: refuses steps that are wrong by themselves.

In a plan that passes, all places are inside their buffers, one lane uses each end of a channel, the k-th
signal of a channel has a k-th wait, and a signal follows each put.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NoReturn

from fairseq_tutel.plans.format import BUFFERS, Place, Plan, PlanError, Step

# Chunks of all buffers; a check of 2 ranks with that many takes 11 s and 541 MiB.
MOST = 1 << 20
# The end of a channel that does a step.
ENDS = {"put": "source", "signal": "source", "flush": "source", "wait": "target"}
# The two operations of a pair, and the field that they share.
PAIRS = (("signal", "wait", "channel"), ("post", "pend", "semaphore"))


def site(rank: int, lane: int, index: int) -> str:
    """Return the name of a step for a sentence."""
    return f"rank {rank}, lane {lane}, step {index}"


def check_shape(plan: Plan) -> None:
    """Refuse a malformed plan by a `PlanError` with the field, or rank, lane and step."""
    _check_head(plan)
    for rank, lane, index, step in plan.steps():
        wrong = next(_wrong_in(plan, rank, step), None)
        if wrong:
            _refuse(plan, f"{site(rank, lane, index)}, a {step.op}, {wrong}")
    _check_lanes(plan)
    _check_pairs(plan)


def _check_head(plan: Plan) -> None:
    if len(plan.programs) != plan.ranks:
        _refuse(plan, f"it has {len(plan.programs)} programs for {plan.ranks} ranks")
    cells = plan.ranks * sum(map(plan.size_of, BUFFERS))
    if cells > MOST:
        _refuse(plan, f"its ranks' buffers have {cells} chunks, more than {MOST}")
    if plan.max_bytes is not None and plan.max_bytes < plan.min_bytes:
        _refuse(plan, f"it is meant for {plan.min_bytes} to {plan.max_bytes} bytes, so for none")
    for index, channel in enumerate(plan.channels):
        ends = (channel.source, channel.target)
        if not all(0 <= end < plan.ranks for end in ends) or ends[0] == ends[1]:
            text = f"channel {index} leads from rank {ends[0]} to rank {ends[1]}"
            _refuse(plan, f"{text}, not between two of its {plan.ranks} ranks")


def _wrong_in(plan: Plan, rank: int, step: Step) -> Iterator[str]:
    """Yield the problems of one step, each the end of a sentence."""
    target = rank
    if step.op in ENDS:
        if step.channel is None or not 0 <= step.channel < len(plan.channels):
            yield f"is on channel {step.channel} of {len(plan.channels)}"
            return
        channel = plan.channels[step.channel]
        end = getattr(channel, ENDS[step.op])
        if end != rank:
            text = f"is on channel {step.channel} from rank {channel.source} to {channel.target}"
            yield f"{text}, where rank {end} does it"
        target = channel.target
    if step.dst is None:
        return
    sources = len(step.src)
    # A sum has at most one term of each rank.
    if sources != 1 if step.op != "reduce" else not 2 <= sources <= max(2, plan.ranks):
        yield f"reads {sources} places"
        return
    for owner, place in [*((rank, each) for each in step.src), (target, step.dst)]:
        size = plan.size_of(place.buffer)
        if place.chunk < 0 or place.chunk + step.n > size:
            yield f"goes beyond the {size} chunks of {place.buffer} on rank {owner}"
    if step.dst.buffer == "in":
        yield "writes in, which belongs to the caller"
    for index, place in enumerate(step.src):
        in_place = step.op == "reduce" and index == 0 and place == step.dst
        if step.op != "put" and not in_place and _overlap(place, step.dst, step.n):
            yield "writes what it reads"


def _overlap(one: Place, other: Place, n: int) -> bool:
    return one.buffer == other.buffer and abs(one.chunk - other.chunk) < n


def _check_lanes(plan: Plan) -> None:
    """Refuse an end of a channel or semaphore that two lanes use."""
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
            text = f"{site(rank, lane, index)}, a {step.op}, uses {what} as lane {first} does"
            _refuse(plan, f"{text}; one lane has it at each end")


def _check_pairs(plan: Plan) -> None:
    """Refuse a put without a later signal, and unequal numbers of signals and waits, posts and pends."""
    sites: dict[tuple[str, int, int | None], list[str]] = defaultdict(list)
    open_puts: dict[int | None, str] = {}
    for rank, lane, index, step in plan.steps():
        here = site(rank, lane, index)
        if step.op == "put":
            open_puts[step.channel] = here
        if step.op == "signal":
            open_puts.pop(step.channel, None)
        for *pair, field in PAIRS:
            if step.op in pair:
                of = rank if field == "semaphore" else -1
                sites[step.op, of, getattr(step, field)].append(here)
    for channel, here in open_puts.items():
        _refuse(plan, f"{here}, a put, has no signal after it on channel {channel}")
    for first, second, field in PAIRS:
        for op, of, number in list(sites):
            if op not in (first, second):
                continue
            given, taken = sites[first, of, number], sites[second, of, number]
            if len(given) != len(taken):
                last = max(given, taken, key=len)[-1]
                text = f"{field} {number} has {len(given)} {first}s and {len(taken)} {second}s"
                _refuse(plan, f"{last}: {text}")


def _refuse(plan: Plan, what: str) -> NoReturn:
    raise PlanError(f"Plan {plan.name!r} is malformed: {what}.")
