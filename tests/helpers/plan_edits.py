"""Makes and edits small collective plans; a rank runs its lanes (lists of steps) concurrently."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from fairseq_tutel.plans.format import Place, Plan, Step, Writer


def two_lanes() -> Plan:
    """Return an all_gather on 2 ranks, in which the second lane of rank 0 waits for the first lane."""
    w = Writer(2)
    w.send(0, 1, ("in", 0), ("tmp", 0))
    w.wait(0, 1)
    w.post(0, 0, lane=0)
    w.copy(0, ("in", 0), ("out", 0), lane=1)
    w.pend(0, 0, lane=1)
    w.copy(0, ("tmp", 0), ("out", 1), lane=1)
    w.wait(1, 0)
    w.send(1, 0, ("in", 0), ("tmp", 0))
    w.copy(1, ("tmp", 0), ("out", 0))
    w.copy(1, ("in", 0), ("out", 1))
    w.flush(1, 0)
    return w.plan("two lanes", "all_gather", 1, temporary=1)


def with_steps(plan: Plan, rank: int, lane: int, start: int, stop: int, *steps: Step) -> Plan:
    """Return the plan with steps start to stop - 1 of a lane replaced by `steps`."""
    programs = [list(lanes) for lanes in plan.programs]
    old = programs[rank][lane]
    programs[rank][lane] = (*old[:start], *steps, *old[stop:])
    return replace(plan, programs=tuple(tuple(lanes) for lanes in programs))


def mutants(plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield (kind, where, plan) for plans with a step deleted, doubled or swapped, or a chunk moved."""
    for rank, lane, index, step in plan.steps():
        where = f"rank {rank}, lane {lane}, step {index} ({step.op})"
        steps = plan.programs[rank][lane]

        def edited(*new: Step, size: int = 1, at=(rank, lane, index)) -> Plan:
            return with_steps(plan, *at, at[-1] + size, *new)

        yield "deleted", where, edited()
        yield "twice", where, edited(step, step)
        if index + 1 < len(steps):
            after = steps[index + 1]
            yield "swapped", f"{where} and {after.op}", edited(after, step, size=2)
        for change in (-1, 1):
            for at, place in enumerate(step.src):
                moved = (*step.src[:at], _moved(place, change), *step.src[at + 1 :])
                yield "source moved", where, edited(replace(step, src=moved))
            if step.dst:
                yield ("destination moved", where, edited(replace(step, dst=_moved(step.dst, change))))


def _moved(place: Place, change: int) -> Place:
    return Place(place.buffer, place.chunk + change)


def drawn(dice: Random, plan: Plan, edits: int) -> Plan:
    """Return the plan after random edits, of which many keep the plan correct."""
    for _ in range(edits):
        rank = dice.randrange(plan.ranks)
        lane = dice.randrange(len(plan.programs[rank]))
        steps = plan.programs[rank][lane]
        at = dice.randrange(len(steps) + 1)
        buffers = [dice.choice(("in", "out", "tmp")) for _ in range(2)]
        src, dst = (Place(b, dice.randrange(max(1, plan.size_of(b)))) for b in buffers)
        what = dice.choice(("signal", "copy", "put", "flush", "lane", "mutant", "swap"))
        channel = dice.randrange(len(plan.channels))
        ends = plan.channels[channel]
        if what == "copy":
            plan = with_steps(plan, rank, lane, at, at, Step("copy", None, (src,), dst, 1))
        elif what == "flush":
            plan = _inserted(plan, dice, ends.source, Step("flush", channel))
        elif what == "signal":
            plan = _inserted(plan, dice, ends.source, Step("signal", channel))
            plan = _inserted(plan, dice, ends.target, Step("wait", channel))
        elif what == "put":
            plan = _inserted(plan, dice, ends.source, Step("put", channel, (src,), dst, 1))
        elif what == "lane":
            # Move the later steps to a new lane, which may wait for the first lane.
            tells, waits = ((Step("post", None, semaphore=9),), (Step("pend", None, semaphore=9),))
            if dice.random() < 0.3:
                tells = waits = ()
            lanes = [*plan.programs[rank], (*waits, *steps[at:])]
            lanes[lane] = (*steps[:at], *tells)
            programs = list(plan.programs)
            programs[rank] = tuple(lanes)
            plan = replace(plan, programs=tuple(programs))
        elif what == "swap" and at + 2 <= len(steps):
            plan = with_steps(plan, rank, lane, at, at + 2, steps[at + 1], steps[at])
        elif what == "mutant":
            plan = dice.choice([mutant for _, _, mutant in mutants(plan)])
    return plan


def _inserted(plan: Plan, dice: Random, rank: int, step: Step) -> Plan:
    """Insert a step into a lane that already uses the step's channel, and return the plan."""
    lanes = plan.programs[rank]
    homes = [i for i, lane in enumerate(lanes) if any(s.channel == step.channel for s in lane)]
    lane = dice.choice(homes or range(len(lanes)))
    at = dice.randrange(len(lanes[lane]) + 1)
    return with_steps(plan, rank, lane, at, at, step)
