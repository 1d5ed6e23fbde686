"""Where the chunks of a plan lie: from numbers of chunks to ranges of elements, for any size.

N ranks, C chunks of a shard, m its elements (of an all_to_all each block its own), s = ceil(m / C). Chunk c
of a shard is its elements min(c s, m) to min((c + 1) s, m). `in` and `out` are shards of exactly m elements
one after another; a slot of `tmp` is as long as the longest chunk that ever lies there.

How long a chunk in `tmp` is depends on what was brought there: `walk` goes through a plan once and
finds out, for all sizes. So blocks of an all_to_all may pass through other ranks, whatever their sizes.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from fairseq_tutel.planning.plan import Place, Plan, Step
from fairseq_tutel.planning.plan_order import order_of
from fairseq_tutel.planning.plan_shape import size_on

# Elements of a shard; of an all_to_all also of every block, by source and destination.
Sizes = int | tuple[tuple[int, ...], ...]


class Kind(NamedTuple):
    """What a chunk's length depends on: which chunk of which block.

    Source and target are the block's, -1 where all shards are alike.
    """

    source: int
    target: int
    chunk: int


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


def kind_of(plan: Plan, rank: int, place: Place) -> Kind:
    """Return what lies at a place of a rank's `in` or `out`."""
    other, chunk = divmod(place.chunk, plan.chunks)
    if plan.collective != "all_to_all":
        return Kind(-1, -1, chunk)
    return Kind(rank, other, chunk) if place.buffer == "in" else Kind(other, rank, chunk)


def walk(plan: Plan) -> Walked:
    """Go through a plan that the checker lets pass."""
    order = order_of(plan)
    lies: dict[tuple[int, Place], Kind] = {}
    ever: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    moves: list[Move] = []
    for number in order.run:
        (rank, lane, index), step = order.sites[number], order.steps[number]
        if step.dst is None or step.n is None:
            continue
        buffer, first = step.src[0]
        places = [Place(buffer, chunk) for chunk in range(first, first + step.n)]
        is_in = buffer == "in"
        kinds = tuple(kind_of(plan, rank, at) if is_in else lies[rank, at] for at in places)
        target = rank if step.channel is None else plan.channels[step.channel].target
        for chunk, kind in enumerate(kinds, step.dst.chunk):
            lies[target, Place(step.dst.buffer, chunk)] = kind
            if step.dst.buffer == "tmp":
                ever[target, chunk].add(kind)
        over = order.rounds[number] + (step.op == "put")
        moves.append(Move(rank, lane, index, step, target, kinds, over))
    tmp_kinds = (
        tuple(frozenset(ever[rank, slot]) for slot in range(plan.temporary))
        for rank in range(plan.ranks)
    )
    return Walked(plan, tuple(moves), tuple(tmp_kinds))


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
        pieces: list[tuple[list[int], int]] = []
        for i, kind in enumerate(move.kinds):
            length, at = self.length(kind), [starts[first + i] for starts, first in ends]
            if any(starts[first + i + 1] - starts[first + i] < length for starts, first in ends):
                raise ValueError(
                    f"{self.plan.name} keeps chunks where shorter ones end, which sizes of "
                    f"{self.sizes} do not allow."
                )
            if pieces and [start + pieces[-1][1] for start in pieces[-1][0]] == at:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
            elif length:
                pieces.append((at, length))
        return [
            Piece(tuple(at[: len(sources)]), at[-1] if dst else 0, length) for at, length in pieces
        ]
