"""Symbolic execution of a collective plan finds wrong results and chunks of a wrong length.

Each chunk of `in` is a symbol, and a sum is the list of its terms. Equal sums get the same ID (a number).
Two sums are equal if they have the same terms, order and brackets, because then their floats have equal
bits. The first two terms of a sum may be swapped, because a + b = b + a for floats, too. The order in which
steps run does not change which data they read, because the plan has passed `check_races`.

The number of chunks need not divide a shard's length, and blocks of an all_to_all may differ in size. The
length of a chunk therefore depends on its kind (index, source and target). A position in `out` has the
length of its final chunk, so no chunk of another kind may be written to this position. A slot of `tmp` is
as long as the longest chunk that is ever written to the slot.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.format import REDUCING, Place, Plan, PlanError


class Kind(NamedTuple):
    """The index, source rank and target rank of a chunk, which determine the chunk's length.

    The source rank and target rank are -1 if all shards have the same length.
    """

    source: int
    target: int
    chunk: int


class _Value(NamedTuple):
    """The symbolic value of a chunk, which is the sum of one input chunk over a set of ranks.

    `number` is the ID of this symbolic value. The integer `ranks` has a bit for each rank in the set.
    """

    number: int
    chunk: int
    ranks: int


Numbers = dict[tuple[int | str, ...], int]
# This table has, for each rank and buffer, each chunk's value and the step that wrote it (-1 for `in`).
Held = dict[tuple[int, str], list[tuple[_Value, int] | None]]


def kind_of(plan: Plan, rank: int, place: Place) -> Kind:
    """Return the `Kind` of the input chunk or the final output chunk at a position in a buffer."""
    other, chunk = divmod(place.chunk, plan.chunks)
    if plan.collective != "all_to_all":
        return Kind(-1, -1, chunk)
    return Kind(rank, other, chunk) if place.buffer == "in" else Kind(other, rank, chunk)


def check_data(plan: Plan, order: Order) -> dict[int, tuple[Kind, ...]]:
    """Check a plan's results, and return the `Kind` of each chunk that a step puts, copies or adds.

    The keys of the returned dict are step numbers.

    Raises:
        PlanError: a result is wrong, or a step reads an empty chunk, adds a chunk twice, or mixes lengths.
    """
    numbers: Numbers = {}
    held: Held = {}
    for rank in range(plan.ranks):
        held[rank, "in"] = [(_leaf(numbers, rank, chunk), -1) for chunk in range(plan.in_chunks)]
        held[rank, "out"] = [None] * plan.out_chunks
        held[rank, "tmp"] = [None] * plan.temporary
    kinds: dict[int, tuple[Kind, ...]] = {}
    mixed = ""
    for number in order.run:
        step, rank = order.steps[number], order.sites[number][0]
        if step.dst is None:
            continue
        columns = []
        for buffer, first in step.src:
            cells = held[rank, buffer][first : first + step.n]
            if None in cells:
                what = f"reads {buffer}[{first + cells.index(None)}], which is still empty"
                _refuse(plan, f"{order.name(number)} {what}")
            columns.append([cell[0] for cell in cells if cell])
        try:
            values = [_sum(numbers, terms) for terms in zip(*columns, strict=True)]
        except ValueError as error:
            _refuse(plan, f"{order.name(number)} {error}")
        target, (buffer, first) = plan.target_of(rank, step), step.dst
        held[target, buffer][first : first + step.n] = [(value, number) for value in values]
        kinds[number] = tuple(_kind_of_value(plan, value) for value in values)
        if step.op == "reduce" and plan.collective not in REDUCING:
            mixed = mixed or f"{order.name(number)} adds chunks of different lengths"
        if buffer == "out" and not mixed:
            for chunk, kind in enumerate(kinds[number], first):
                if kind_of(plan, target, Place(buffer, chunk)) != kind:
                    where = f"out[{chunk}] of rank {target}"
                    mixed = f"{order.name(number)} writes a chunk of a different length to {where}"
    _check_results(plan, order, held)
    if mixed:
        text = "which fails if the number of chunks does not divide the size; keep the chunk in tmp instead"
        raise PlanError(f"Plan {plan.name!r} mixes lengths: {mixed}, {text}.")
    return kinds


def _leaf(numbers: Numbers, rank: int, chunk: int) -> _Value:
    return _Value(numbers.setdefault(("in", rank, chunk), len(numbers)), chunk, 1 << rank)


def _sum(numbers: Numbers, terms: Sequence[_Value]) -> _Value:
    """Return the symbolic sum of terms in the given order. Raise ValueError if terms cannot be added."""
    first, *others = terms
    if not others:
        return first
    ranks = first.ranks
    for term in others:
        if term.chunk != first.chunk:
            raise ValueError(f"adds in[{term.chunk}] to in[{first.chunk}], a different chunk")
        if ranks & term.ranks:
            raise ValueError(f"adds in[{first.chunk}] of {_ranks(ranks & term.ranks)} twice")
        ranks |= term.ranks
    each = [term.number for term in terms]
    key = (*sorted(each[:2]), *each[2:])
    return _Value(numbers.setdefault(key, len(numbers)), first.chunk, ranks)


def _kind_of_value(plan: Plan, value: _Value) -> Kind:
    block, chunk = divmod(value.chunk, plan.chunks)
    if plan.collective != "all_to_all":
        return Kind(-1, -1, chunk)
    return Kind(value.ranks.bit_length() - 1, block, chunk)


def _check_results(plan: Plan, order: Order, held: Held) -> None:
    """Raise PlanError if an output buffer's final content differs from the collective's result."""
    for rank in range(plan.ranks):
        for chunk, cell in enumerate(held[rank, "out"]):
            wanted = _wanted(plan, rank, chunk)
            where = f"out[{chunk}] of rank {rank}"
            if cell is None:
                end = f"rank {rank}, lane 0, at the end"
                _refuse(plan, f"{end}: {where} is empty; it must hold {_text(*wanted)}")
            value, writer = cell
            if value[1:] != wanted:
                text = f"leaves {_text(*value[1:])} in {where} instead of {_text(*wanted)}"
                _refuse(plan, f"{order.name(writer)} {text}")
            first = held[0, "out"][chunk] if plan.collective == "all_reduce" else cell
            if first and first[0] != value:
                text = f"adds the terms of {where} in another order than those of out[{chunk}] of rank 0"
                _refuse(plan, f"{order.name(writer)} {text}, so their bits may differ")


def _wanted(plan: Plan, rank: int, chunk: int) -> tuple[int, int]:
    """Return which input chunk, summed over which ranks (as bits), an output chunk must hold."""
    everyone = (1 << plan.ranks) - 1
    other, offset = divmod(chunk, plan.chunks)
    match plan.collective:
        case "all_gather":
            return offset, 1 << other
        case "all_to_all":
            return rank * plan.chunks + offset, 1 << other
        case "reduce_scatter":
            return rank * plan.chunks + chunk, everyone
    return chunk, everyone


def _text(chunk: int, ranks: int) -> str:
    return f"in[{chunk}] of {_ranks(ranks)}"


def _ranks(bits: int) -> str:
    """Return a text such as "ranks 0, 2" for an integer with a bit for each rank."""
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _refuse(plan: Plan, what: str) -> NoReturn:
    raise PlanError(f"Plan {plan.name!r} gives a wrong result: {what}.")
