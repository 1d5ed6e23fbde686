"""Check of lengths: refuses a chunk in a place of `out` that has another length, for all sizes at once.

The number of chunks need not divide a shard, and each block of an all_to_all has its own size. So the
length of a chunk depends on its kind. A place of `out` has the length of its final chunk, and a chunk of
another kind does not fit there. A slot of `tmp` is as long as its longest chunk.
"""

from typing import NamedTuple, NoReturn

from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.format import Place, Plan, PlanError


class Kind(NamedTuple):
    """All that a chunk's length depends on: its index, and its block's source and target.

    Source and target are -1 if all shards have the same length.
    """

    source: int
    target: int
    chunk: int


def kind_of(plan: Plan, rank: int, place: Place) -> Kind:
    """Return the kind of a place of a rank's `in` or `out`."""
    other, chunk = divmod(place.chunk, plan.chunks)
    if plan.collective != "all_to_all":
        return Kind(-1, -1, chunk)
    return Kind(rank, other, chunk) if place.buffer == "in" else Kind(other, rank, chunk)


def kinds_of(plan: Plan, order: Order) -> dict[int, tuple[Kind, ...]]:
    """Return the kinds of the chunks that each put, copy and reduce moves, by step number.

    The plan has passed `check_races` and `check_data`. A `PlanError` refuses a chunk in a place of `out` of
    another kind, and a sum of two kinds.
    """
    tmp: dict[tuple[int, int], Kind] = {}

    def at(rank: int, place: Place) -> Kind:
        return tmp[rank, place.chunk] if place.buffer == "tmp" else kind_of(plan, rank, place)

    found: dict[int, tuple[Kind, ...]] = {}
    for number in order.run:
        step, rank = order.steps[number], order.ranks[number]
        if step.dst is None or step.n is None:
            continue
        target = plan.target_of(rank, step)
        kinds = []
        for i in range(step.n):
            kind, *others = [at(rank, Place(src.buffer, src.chunk + i)) for src in step.src]
            dst = Place(step.dst.buffer, step.dst.chunk + i)
            if any(other != kind for other in others):
                _refuse(plan, f"{order.name(number)} adds chunks of different lengths")
            if dst.buffer == "tmp":
                tmp[target, dst.chunk] = kind
            elif kind_of(plan, target, dst) != kind:
                where = f"out[{dst.chunk}] of rank {target}"
                _refuse(plan, f"{order.name(number)} writes a chunk of another length to {where}")
            kinds.append(kind)
        found[number] = tuple(kinds)
    return found


def _refuse(plan: Plan, what: str) -> NoReturn:
    text = "which fails for sizes that the number of chunks does not divide; keep it in tmp instead"
    raise PlanError(f"Plan {plan.name!r} mixes lengths: {what}, {text}.")
