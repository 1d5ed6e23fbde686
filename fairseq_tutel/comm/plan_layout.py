"""Where the chunks of a plan lie: from numbers of chunks to ranges of elements, for any size.

N ranks, C chunks of a shard, m its elements (of an all_to_all each block its own), s = ceil(m / C). Chunk c
of a shard is its elements min(c s, m) to min((c + 1) s, m). `in` and `out` are shards of exactly m elements
one after another; a slot of `tmp` is as long as the longest chunk that ever lies there.

How long a chunk in `tmp` is depends on what was brought there: `walk` goes through a plan once and
finds out, for all sizes. So blocks of an all_to_all may pass through other ranks, whatever their sizes.

It also gives the two-sided form: messages go in rounds, all ranks in step. What a rank puts on a channel
until it signals or flushes is sent in the first round after all that came before it; a signal without
puts costs no round, since a rank's steps and what it receives have one order here.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from fairseq_tutel.planning.plan import Place, Plan, Step

# Elements of a shard; of an all_to_all also of every block, by source and destination, 0 where this rank
# need not know.
Sizes = int | Sequence[Sequence[int]]


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
    round: int = 0


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
    """Go through a plan that the checker lets pass.

    Raises:
        ValueError: it waits for what never comes, or reads what nobody wrote.
    """
    lies: dict[tuple[int, Place], Kind] = {}
    ever: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    moves: list[Move] = []
    held: dict[int, list[int]] = defaultdict(list)  # by channel, puts that are not sent yet
    sent: dict[int, int] = defaultdict(int)  # by channel, the last round
    signals: dict[tuple[int | None, ...], deque[int]] = defaultdict(deque)

    def send(channel: int, over: int) -> None:
        for number in held.pop(channel, ()):
            moves[number] = replace(moves[number], round=over + 1)
            sent[channel] = over + 1

    def kinds_at(rank: int, lane: int, index: int, place: Place, n: int) -> tuple[Kind, ...]:
        places = [Place(place.buffer, place.chunk + i) for i in range(n)]
        if place.buffer == "in":
            return tuple(kind_of(plan, rank, each) for each in places)
        if any((rank, each) not in lies for each in places):
            raise ValueError(f"rank {rank}, lane {lane}, step {index} reads what nobody wrote.")
        return tuple(lies[rank, each] for each in places)

    def move(rank: int, lane: int, index: int, step: Step, over: int) -> None:
        target = rank if step.channel is None else plan.channels[step.channel].target
        dst, n = step.dst, step.n
        assert dst is not None and n is not None
        kinds, *others = [kinds_at(rank, lane, index, place, n) for place in step.src]
        if any(other != kinds for other in others):
            raise ValueError(f"rank {rank}, lane {lane}, step {index} adds up different chunks.")
        for chunk, kind in enumerate(kinds, dst.chunk):
            lies[target, Place(dst.buffer, chunk)] = kind
            if dst.buffer == "tmp":
                ever[target, chunk].add(kind)
        moves.append(Move(rank, lane, index, step, target, kinds, over))

    def take(rank: int, lane: int, index: int, step: Step, over: int) -> int | None:
        """Take a step after so many rounds; return how many are over then, None where it must wait."""
        channel = step.channel
        key = (rank, step.semaphore) if channel is None else (channel,)
        if step.op in ("wait", "pend"):
            return max(over, signals[key].popleft()) if signals[key] else None
        if step.op in ("put", "copy", "reduce"):
            move(rank, lane, index, step, over)
            if channel is not None:
                held[channel].append(len(moves) - 1)
            return over
        if channel is None:
            signals[key].append(over)
            return over
        send(channel, over)
        if step.op == "flush":
            return max(over, sent[channel])
        signals[key].append(max(over, sent[channel]))
        return over

    left = [(rank, lane, 0, 0) for rank, p in enumerate(plan.programs) for lane in range(len(p))]
    while left:
        waiting = []
        for rank, lane, start, over in left:
            steps = plan.programs[rank][lane]
            for index in range(start, len(steps)):
                after = take(rank, lane, index, steps[index], over)
                if after is None:
                    waiting.append((rank, lane, index, over))
                    break
                over = after
        if waiting == left:
            raise ValueError("the plan waits for what never comes.")
        left = waiting
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
                places = (Place(buffer, chunk) for chunk in range(self.plan.size_of(buffer)))
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
