"""Check of data: refuses plans with another result than their collective's, by symbolic execution.

Each chunk of `in` is a leaf, and a sum is the list of its terms. Equal expressions have the same number, so
sums of floats are compared bit for bit: the same terms in the same order and brackets. The first two terms
may be exchanged, since a + b = b + a for floats, too.

Any order of steps gives the same reads, since the plan has passed `check_races`.
"""

from dataclasses import dataclass, field
from typing import NoReturn

from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.checker.shape import size_on
from fairseq_tutel.plans.format import Place, Plan, PlanError


@dataclass
class Expressions:
    """Numbered expressions.

    Attributes:
        meanings: by number, the chunk of `in` and, as bits, the ranks whose chunks are summed.
        numbers: by the numbers of the terms, or by the leaf.
    """

    meanings: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[tuple[int | str, ...], int] = field(default_factory=dict)

    def leaf(self, rank: int, chunk: int) -> int:
        """Return the number of a rank's chunk of `in`."""
        return self._number(("in", rank, chunk), (chunk, 1 << rank))

    def sum(self, terms: list[int]) -> int:
        """Return the number of the sum of terms in this order; a ValueError ends a sentence."""
        chunk, ranks = self.meanings[terms[0]]
        for term in terms[1:]:
            other, more = self.meanings[term]
            if other != chunk:
                raise ValueError(f"adds in[{other}] to in[{chunk}]")
            if ranks & more:
                raise ValueError(f"adds in[{chunk}] of {_ranks(ranks & more)} twice")
            ranks |= more
        return self._number((*sorted(terms[:2]), *terms[2:]), (chunk, ranks))

    def _number(self, key: tuple[int | str, ...], meaning: tuple[int, int]) -> int:
        number = self.numbers.setdefault(key, len(self.meanings))
        if number == len(self.meanings):
            self.meanings.append(meaning)
        return number


def check_data(plan: Plan, order: Order) -> None:
    """Refuse undefined reads, contributions that count twice, and wrong results by a `PlanError`."""
    known = Expressions()
    # By rank and buffer: for each chunk its expression and the step that wrote it, for `in` -1.
    held: dict[tuple[int, str], list[tuple[int, int] | None]] = {}
    for rank in range(plan.ranks):
        for buffer in ("out", "tmp"):
            held[rank, buffer] = [None] * size_on(plan, rank, buffer)
        own = range(size_on(plan, rank, "in"))
        held[rank, "in"] = [(known.leaf(rank, chunk), -1) for chunk in own]
    for number in order.run:
        step, rank = order.steps[number], order.ranks[number]
        if step.dst is None or step.n is None:
            continue
        target = plan.target_of(rank, step)
        columns = []
        for place in step.src:
            cells = held[rank, place.buffer][place.chunk : place.chunk + step.n]
            if None in cells:
                where = Place(place.buffer, place.chunk + cells.index(None))
                what = f"reads {where.buffer}[{where.chunk}], which holds nothing"
                _refuse(plan, f"{order.name(number)} {what}")
            columns.append([cell[0] for cell in cells if cell])
        try:
            values = [
                terms[0] if step.op != "reduce" else known.sum(list(terms))
                for terms in zip(*columns, strict=True)
            ]
        except ValueError as error:
            _refuse(plan, f"{order.name(number)} {error}")
        first = step.dst.chunk
        held[target, step.dst.buffer][first : first + step.n] = [(value, number) for value in values]
    _check_results(plan, order, known, {rank: held[rank, "out"] for rank in range(plan.ranks)})


def _check_results(
    plan: Plan,
    order: Order,
    known: Expressions,
    results: dict[int, list[tuple[int, int] | None]],
) -> None:
    """Refuse an `out` with another content than the collective's."""
    for rank, cells in results.items():
        for chunk, cell in enumerate(cells):
            wanted = _wanted(plan, rank, chunk)
            where = f"out[{chunk}] of rank {rank}"
            if cell is None:
                end = f"rank {rank}, lane 0, at the end"
                _refuse(plan, f"{end}: {where} holds nothing, not {_text(*wanted)}")
            value, writer = cell
            meaning = known.meanings[value]
            if meaning != wanted:
                text = f"leaves {_text(*meaning)} in {where}, not {_text(*wanted)}"
                _refuse(plan, f"{order.name(writer)} {text}")
            first = results[0][chunk] if plan.collective == "all_reduce" else cell
            if first and first[0] != value:
                text = f"adds up {where} in another order than out[{chunk}] of rank 0"
                _refuse(plan, f"{order.name(writer)} {text} is, so that their bits may differ")


def _wanted(plan: Plan, rank: int, chunk: int) -> tuple[int, int]:
    """Return the final content of a place of `out`: the chunk of `in` and, as bits, the summed ranks."""
    everyone = (1 << plan.ranks) - 1
    other, offset = divmod(chunk, plan.chunks)
    match plan.collective:
        case "all_gather":
            return offset, 1 << other
        case "all_to_all":
            return rank * plan.chunks + offset, 1 << other
        case "reduce_scatter":
            return rank * plan.chunks + chunk, everyone
        case "broadcast":
            return chunk, 1 << (plan.root or 0)
    return chunk, everyone


def _text(chunk: int, ranks: int) -> str:
    return f"in[{chunk}] of {_ranks(ranks)}"


def _ranks(bits: int) -> str:
    """Return text for the ranks of some bits."""
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _refuse(plan: Plan, what: str) -> NoReturn:
    raise PlanError(f"Plan {plan.name!r} gives a wrong result: {what}.")
