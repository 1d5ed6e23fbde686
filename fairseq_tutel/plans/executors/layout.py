"""Where the chunks of a plan lie: from numbers of chunks to ranges of elements, for any size.

N ranks, C chunks of a shard, m its elements (of an all_to_all each block its own), s = ceil(m / C). Chunk c
of a shard is its elements min(c s, m) to min((c + 1) s, m). `in` and `out` are shards of exactly m elements
one after another; a slot of `tmp` is as long as the longest chunk that ever lies there.

How long a chunk in `tmp` is depends on what was brought there (`plans.checker.lengths`). `walk` finds it
for all sizes at once. So blocks of an all_to_all may pass through other ranks, whatever their sizes.
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

# Elements of a shard; of an all_to_all also of every block, by source and destination.
Sizes = int | tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """A run of elements: where it begins in each source and in the destination, and how long it is."""

    src: tuple[int, ...]
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class Move:
    """A put, copy or reduce.

    Attributes:
        rank: whose step it is.
        lane: of the rank.
        index: of the lane.
        step: itself.
        target: the rank that its destination is on.
        kinds: of its n chunks.
        round: of a put in which it is sent, from 1 on; of others, how many rounds are over before it.
    """

    rank: int
    lane: int
    index: int
    step: Step
    target: int
    kinds: tuple[Kind, ...]
    round: int


@dataclass(frozen=True)
class Walked:
    """What `walk` finds.

    Attributes:
        plan: itself.
        moves: in an order in which they can happen.
        tmp_kinds: of every rank's slots, what ever lies there.
    """

    plan: Plan
    moves: tuple[Move, ...]
    tmp_kinds: tuple[tuple[frozenset[Kind], ...], ...]


def walk(plan: Plan) -> Walked:
    """Go through a plan that the checker lets pass.

    Raises:
        PlanError: chunks would not fit their places at all sizes.
    """
    order = order_of(plan)
    ever: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    moves: list[Move] = []
    for number, kinds in kinds_of(plan, order).items():
        (rank, lane, index), step = order.sites[number], order.steps[number]
        assert step.dst is not None
        target = rank if step.channel is None else plan.channels[step.channel].target
        if step.dst.buffer == "tmp":
            for chunk, kind in enumerate(kinds, step.dst.chunk):
                ever[target, chunk].add(kind)
        over = order.rounds[number] + (step.op == "put")
        moves.append(Move(rank, lane, index, step, target, kinds, over))
    tmp_kinds = (
        tuple(frozenset(ever[rank, slot]) for slot in range(plan.temporary))
        for rank in range(plan.ranks)
    )
    return Walked(plan, tuple(moves), tuple(tmp_kinds))


def runs(lengths: Iterable[int], starts: Iterable[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Return the runs of elements that chunks make, those side by side at all places as one.

    Args:
        lengths: of the chunks.
        starts: of each chunk, where it begins at every place.

    Returns:
        Of each run, where it begins at every place, and its length; chunks without elements have none.
    """
    found: list[tuple[list[int], int]] = []
    for length, at in zip(lengths, starts, strict=True):
        if found and [start + found[-1][1] for start in found[-1][0]] == list(at):
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((list(at), length))
    return found


class Layout:
    """Where all chunks of one call lie.

    Args:
        walked: of its plan.
        sizes: see `Sizes`.
    """

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
        """Return the first element of every chunk of a rank's buffer, and last how many it has."""
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
        """Return how many elements a rank's buffer has."""
        return self.starts(rank, buffer)[-1]

    def pieces(self, move: Move, src: bool = True, dst: bool = True) -> list[Piece]:
        """Return what moves, neighbours as one.

        Args:
            move: of the plan.
            src: whether its sources are looked at.
            dst: whether its destination is; both ends agree on the lengths of chunks in any case.
        """
        assert move.step.dst is not None
        sources = move.step.src if src else ()
        ends = [(self.starts(move.rank, place.buffer), place.chunk) for place in sources]
        if dst:
            ends.append((self.starts(move.target, move.step.dst.buffer), move.step.dst.chunk))
        lengths = map(self.length, move.kinds)
        at = ([starts[first + i] for starts, first in ends] for i in range(len(move.kinds)))
        return [
            Piece(tuple(run[: len(sources)]), run[-1] if dst else 0, length)
            for run, length in runs(lengths, at)
        ]
