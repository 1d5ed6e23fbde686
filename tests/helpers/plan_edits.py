"""A plan of several lanes, and edits of plans."""

from dataclasses import replace

from fairseq_tutel.planning.plan import Plan, Step, Writer


def two_lanes() -> Plan:
    """broadcast on 2 ranks: the root's second lane copies, once its first has sent and heard back."""
    w = Writer(2)
    w.put(0, 1, ("in", 0), ("tmp", 0))
    w.signal(0, 1)
    w.wait(0, 1)
    w.post(0, 0, lane=0)
    w.pend(0, 0, lane=1)
    w.copy(0, ("in", 0), ("out", 0), lane=1)
    w.wait(1, 0)
    w.copy(1, ("tmp", 0), ("out", 0))
    w.signal(1, 0)
    return w.plan("two lanes", "broadcast", 1, temporary=1, root=0)


def with_steps(plan: Plan, rank: int, lane: int, start: int, stop: int, *steps: Step) -> Plan:
    """Return the plan with other steps in a lane from start to before stop."""
    programs = [list(lanes) for lanes in plan.programs]
    old = programs[rank][lane]
    programs[rank][lane] = (*old[:start], *steps, *old[stop:])
    return replace(plan, programs=tuple(tuple(lanes) for lanes in programs))
