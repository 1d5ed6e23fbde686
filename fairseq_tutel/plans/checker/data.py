"""Refuses plans that give another result than their collective asks for, by expressions instead of numbers.

Every chunk of `in` is a leaf; a sum is the list of its terms, made once for all who form the same, so that
equal expressions are equal numbers. That makes sums of floats comparable bit for bit: the same terms in the
same order and brackets, where the first two may be exchanged, since a + b = b + a in floats, too.

The order of steps does not matter here: `check_races` has shown that every order reads the same.
"""

from dataclasses import dataclass, field
from typing import NoReturn

from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.checker.shape import size_on
from fairseq_tutel.plans.format import Place, Plan, PlanError


@dataclass
class Expressions:
    """All that chunks may hold, by number.

    Attributes:
        meanings: of each the chunk of `in`, and the ranks whose are added up, as bits.
        numbers: of the terms, or of (chunk, bits) of a leaf.
    """

    meanings: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[tuple[int | str, ...], int] = field(default_factory=dict)

    def leaf(self, rank: int, chunk: int) -> int:
        """Return a rank's chunk of `in`."""
        return self._number(("in", rank, chunk), (chunk, 1 << rank))

    def sum(self, terms: list[int]) -> int:
        """Return the sum of terms in this order.

        Raises:
            ValueError: they do not add up to something of use; the end of a sentence.
        """
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
    """Refuse undefined reads, contributions that count twice, and results other than asked.

    Raises:
        PlanError: naming the step.
    """
    known = Expressions()
    # By rank and buffer: of every chunk its expression and the step that wrote it, of `in` -1.
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
        target = rank if step.channel is None else plan.channels[step.channel].target
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
        held[target, step.dst.buffer][first : first + step.n] = [
            (value, number) for value in values
        ]
    _check_results(plan, order, known, {rank: held[rank, "out"] for rank in range(plan.ranks)})


def _check_results(
    plan: Plan,
    order: Order,
    known: Expressions,
    results: dict[int, list[tuple[int, int] | None]],
) -> None:
    """Refuse an `out` that holds something else than its collective asks for."""
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
    """Return the chunk of `in` and, as bits, the ranks whose sum a place of `out` holds at the end."""
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
    """Return what an expression holds, for a sentence."""
    return f"in[{chunk}] of {_ranks(ranks)}"


def _ranks(bits: int) -> str:
    """Return the ranks that bits stand for, for a sentence."""
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _refuse(plan: Plan, what: str) -> NoReturn:
    raise PlanError(f"Plan {plan.name!r} gives a wrong result: {what}.")
