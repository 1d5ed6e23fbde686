"""The layout of a collective plan's buffers is the position and length of each chunk for given sizes.

A shard has C chunks and m elements. In an all_to_all, shards may differ in m. Let s = ceil(m / C) be the
number of elements of a full chunk. Chunk c of a shard has the elements from min(c s, m) to min((c + 1) s,
m). The buffers `in` and `out` are lists of shards of exactly m elements, one after another. A slot of `tmp`
is as long as the longest chunk that the slot ever holds, so shards of any size can pass through other
ranks. The function `walk` finds the chunks of each slot once for all sizes.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from fairseq_tutel.plans.checker.data import Kind, check_data
from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.format import Place, Plan

# The number of elements of a shard or, for an all_to_all, of each shard by (source, destination).
Sizes = int | tuple[tuple[int, ...], ...]
# An end of a transfer is a rank and the position of the first chunk on this rank.
End = tuple[int, Place]


class Move(NamedTuple):
    """A put, copy or reduce of a collective plan.

    Attributes:
        site: the rank, lane and index of the step.
        kinds: the `Kind` of each chunk.
        round: the round (from 1) in which a put is sent, or the number of rounds before a copy or reduce.
    """

    site: tuple[int, int, int]
    op: str
    sources: tuple[End, ...]
    target: End
    kinds: tuple[Kind, ...]
    round: int

    @property
    def ranks(self) -> tuple[int, int]:
        """The rank that runs the step, and the rank to which the step writes."""
        return self.site[0], self.target[0]


class Walked(NamedTuple):
    """A collective plan with the steps that move chunks (`moves`), in a possible execution order.

    `tmp_kinds` lists, by rank and slot, the kinds of all chunks that a slot of `tmp` ever holds.
    """

    plan: Plan
    moves: tuple[Move, ...]
    tmp_kinds: tuple[tuple[frozenset[Kind], ...], ...]


def walk(plan: Plan) -> Walked:
    """Return the steps of a checked collective plan that move chunks, in a possible execution order."""
    order = Order(plan)
    ever: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    moves: list[Move] = []
    for number, kinds in check_data(plan, order).items():
        step, site = order.steps[number], order.sites[number]
        assert step.dst is not None
        target = plan.target_of(site[0], step)
        if step.dst.buffer == "tmp":
            for chunk, kind in enumerate(kinds, step.dst.chunk):
                ever[target, chunk].add(kind)
        sources = tuple((site[0], place) for place in step.src)
        ended = order.rounds[number] + (step.op == "put")
        moves.append(Move(site, step.op, sources, (target, step.dst), kinds, ended))
    tmp_kinds = (
        tuple(frozenset(ever[rank, slot]) for slot in range(plan.temporary)) for rank in range(plan.ranks)
    )
    return Walked(plan, tuple(moves), tuple(tmp_kinds))


class Layout:
    """The position and length, in elements, of each chunk in one call of a collective plan.

    `sizes` counts rows of `width` elements. With `window`, the layout covers only this range of elements of
    each chunk, and a slot is as long as the window. Positions in `in` and `out` ignore the window.
    """

    def __init__(self, walked: Walked, sizes: Sizes, width: int = 1, window: range | None = None) -> None:
        self.walked, self.plan, self.sizes = walked, walked.plan, sizes
        self.width, self.window = width, window
        self.length, self.starts = cache(self._length), cache(self._starts)

    def _part(self, m: int, chunk: int) -> int:
        """Return the number of elements of a chunk in a shard of m rows."""
        if self.plan.chunks == 1:
            return m * self.width
        s = -(-m // self.plan.chunks)
        return (min((chunk + 1) * s, m) - min(chunk * s, m)) * self.width

    def _length(self, kind: Kind) -> int:
        sizes, window = self.sizes, self.window
        length = self._part(
            sizes if isinstance(sizes, int) else sizes[kind.source][kind.target], kind.chunk
        )
        return length if window is None else min(max(length - window.start, 0), len(window))

    def _starts(self, rank: int, buffer: str) -> Sequence[int]:
        """Return the first element of each chunk in a rank's buffer, followed by the buffer's length."""
        if buffer in ("in", "out"):
            chunks = range(self.plan.chunks)
            lengths = [self._part(m, chunk) for m in self._shards(rank, buffer) for chunk in chunks]
        elif self.window:
            stride, slots = len(self.window), self.plan.temporary + self.plan.out_chunks
            return range(0, (slots + 1) * stride, stride)
        else:
            kinds = self.walked.tmp_kinds[rank]
            lengths = [max(map(self.length, each), default=0) for each in kinds]
        return [0, *accumulate(lengths)]

    def _shards(self, rank: int, buffer: str) -> Sequence[int]:
        """Return the number of rows of each shard in a rank's buffer `in` or `out`."""
        sizes = self.sizes
        if isinstance(sizes, int):
            return [sizes] * (self.plan.size_of(buffer) // self.plan.chunks)
        return sizes[rank] if buffer == "in" else [row[rank] for row in sizes]

    def runs(self, kinds: Sequence[Kind], *ends: End) -> list[tuple[list[tuple[int, str, int]], int]]:
        """Join chunks into a run if they are adjacent in the buffers of all `ends`; leave out empty chunks.

        Returns:
            For each run, a list with the (rank, buffer, first element) of each end, and the run's length.
        """
        starts = [(self.starts(rank, buffer), chunk) for rank, (buffer, chunk) in ends]
        found: list[tuple[list[int], int]] = []
        for i, kind in enumerate(kinds):
            length, at = self.length(kind), [own[first + i] for own, first in starts]
            if found and [start + found[-1][1] for start in found[-1][0]] == at:
                found[-1] = (found[-1][0], found[-1][1] + length)
            elif length:
                found.append((at, length))
        places = [(rank, place.buffer) for rank, place in ends]
        return [([(*end, start) for end, start in zip(places, at, strict=True)], n) for at, n in found]
