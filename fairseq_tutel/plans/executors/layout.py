"""The layout of a plan's buffers: which elements each chunk has, for any size.

N ranks, C chunks of a shard, m elements of a shard (of an all_to_all each block has its own m),
s = ceil(m / C). Chunk c of a shard has the elements min(c s, m) to min((c + 1) s, m). `in` and `out` are
shards of exactly m elements, one after another. A slot of `tmp` is as long as the longest chunk that it
ever holds.

The length of a chunk in `tmp` depends on where it came from (`plans.checker.lengths`). `walk` finds that
for all sizes at once, so blocks of an all_to_all may pass through other ranks, whatever their sizes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from fairseq_tutel.plans.checker.lengths import Kind, kind_of, kinds_of
from fairseq_tutel.plans.checker.order import order_of
from fairseq_tutel.plans.checker.shape import size_on
from fairseq_tutel.plans.format import Place, Plan, Step

# Elements of a shard; of an all_to_all those of each block, by source and destination.
Sizes = int | tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """A run of elements: its first element in each source and in the destination, and its length."""

    src: tuple[int, ...]
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class Move:
    """A put, copy or reduce.

    Attributes:
        rank: the rank of the step.
        lane: its lane.
        index: its index in the lane.
        step: the step.
        target: the rank of its destination.
        dst: its destination.
        kinds: the kind of each chunk.
        round: of a put, the round in which it is sent, from 1; of others, the rounds that end before it.
    """

    rank: int
    lane: int
    index: int
    step: Step
    target: int
    dst: Place
    kinds: tuple[Kind, ...]
    round: int


@dataclass(frozen=True)
class Walked:
    """A plan and its moves.

    Attributes:
        plan: the plan.
        moves: all moves, in an order in which they can happen.
        tmp_kinds: for each rank and slot of `tmp`, the kinds of chunks that it ever holds.
    """

    plan: Plan
    moves: tuple[Move, ...]
    tmp_kinds: tuple[tuple[frozenset[Kind], ...], ...]


def walk(plan: Plan) -> Walked:
    """Return the moves of a plan that the checker has accepted."""
    order = order_of(plan)
    ever: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    moves: list[Move] = []
    for number, kinds in kinds_of(plan, order).items():
        step, dst = order.steps[number], order.steps[number].dst
        assert dst is not None
        rank = order.ranks[number]
        target = plan.target_of(rank, step)
        if dst.buffer == "tmp":
            for chunk, kind in enumerate(kinds, dst.chunk):
                ever[target, chunk].add(kind)
        ended = order.rounds[number] + (step.op == "put")
        moves.append(Move(*order.sites[number], step, target, dst, kinds, ended))
    tmp_kinds = (
        tuple(frozenset(ever[rank, slot]) for slot in range(plan.temporary)) for rank in range(plan.ranks)
    )
    return Walked(plan, tuple(moves), tuple(tmp_kinds))


def runs(lengths: Iterable[int], starts: Iterable[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Join chunks that are adjacent in all places.

    Args:
        lengths: the length of each chunk.
        starts: for each chunk, its first element in each place.

    Returns:
        For each run, its first element in each place, and its length. Empty chunks are left out.
    """
    found: list[tuple[list[int], int]] = []
    for length, at in zip(lengths, starts, strict=True):
        if found and [start + found[-1][1] for start in found[-1][0]] == list(at):
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((list(at), length))
    return found


class Layout:
    """The positions of all chunks in one call."""

    def __init__(self, walked: Walked, sizes: Sizes) -> None:
        self.walked, self.plan, self.sizes = walked, walked.plan, sizes
        self._starts: dict[tuple[int, str], list[int]] = {}
        self.length = cache(self._length)

    def _length(self, kind: Kind) -> int:
        sizes = self.sizes
        m = sizes if isinstance(sizes, int) else sizes[kind.source][kind.target]
        s = -(-m // self.plan.chunks)
        return min((kind.chunk + 1) * s, m) - min(kind.chunk * s, m)

    def starts(self, rank: int, buffer: str) -> list[int]:
        """Return the first element of each chunk of a rank's buffer, and at the end its length."""
        key = (rank, buffer)
        if key not in self._starts:
            if buffer == "tmp":
                slots = self.walked.tmp_kinds[rank]
                lengths = [max(map(self.length, kinds), default=0) for kinds in slots]
            else:
                places = (Place(buffer, chunk) for chunk in range(size_on(self.plan, rank, buffer)))
                lengths = [self.length(kind_of(self.plan, rank, place)) for place in places]
            self._starts[key] = [0, *accumulate(lengths)]
        return self._starts[key]

    def size(self, rank: int, buffer: str) -> int:
        """Return the number of elements of a rank's buffer."""
        return self.starts(rank, buffer)[-1]

    def pieces(self, move: Move, src: bool = True, dst: bool = True) -> list[Piece]:
        """Return a move's runs of elements.

        Without `src` or `dst` that end is ignored, so adjacent chunks of the other end make longer runs.
        """
        sources = move.step.src if src else ()
        ends = [(self.starts(move.rank, place.buffer), place.chunk) for place in sources]
        if dst:
            ends.append((self.starts(move.target, move.dst.buffer), move.dst.chunk))
        lengths = map(self.length, move.kinds)
        at = ([starts[first + i] for starts, first in ends] for i in range(len(move.kinds)))
        return [
            Piece(tuple(run[: len(sources)]), run[-1] if dst else 0, length)
            for run, length in runs(lengths, at)
        ]
