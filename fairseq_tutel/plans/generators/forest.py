"""Makes collective plans from ForestColl's trees, along which ranks distribute data or sum data.

There are N ranks, k trees per root rank, and P slices of the data. A shard has P k chunks, k in each
slice. A tree with m copies carries m adjacent chunks of each slice. Ranks send chunks in
rounds. All chunks from one rank to another rank in a round share a signal. To distribute a shard, a rank
sends in the round that equals its distance from the root. To sum data, a rank sends in the round that
equals its distance from the farthest leaf below it. Each slice runs one round after the previous slice.
With trees of depth d, a plan distributes or sums data in d + P - 1 rounds. With more slices, more links are
busy at the same time.

A rank puts only to ranks that have begun the call, as a signal or a chunk from these ranks shows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.forest import Forest
from fairseq_tutel.plans.format import REDUCING, Place, Plan, Writer


def plan_of(collective: str, forest: Forest, *, slices: int = 1) -> Plan:
    """Return a plan that sums data along trees to the roots, or sends data from the roots, or both."""
    network, w = forest.network, Writer(forest.network.ranks)
    temporary = _reduce(w, forest, collective, slices) if collective in REDUCING else 0
    if collective != "reduce_scatter":
        _distribute(w, forest, collective in REDUCING, slices)
    written = {step.channel for lanes in w.lanes for step in lanes[0] if step.op == "put"}
    for (source, target, _), channel in w.channels.items():
        if channel in written:
            w.flush(source, target)
    return w.plan(
        f"forest {collective}, {network.name}",
        collective,
        slices * forest.share.trees * (network.ranks if collective == "all_reduce" else 1),
        temporary=temporary,
        network=network.digest,
    )


class _Branch(NamedTuple):
    """The chunks of slice p that one edge of a tree carries, p rounds after those of slice 0.

    Attributes:
        chunk: the position of the branch's first chunk, counted over all shards.
        n: the number of chunks.
        own: this chunk's position in a buffer of only the root's shard; None unless the parent is the root.
        depth: the parent's distance from the root, plus p.
        height: the child's distance from the farthest leaf below it, plus p.
    """

    chunk: int
    n: int
    own: int | None
    parent: int
    child: int
    depth: int
    height: int


def _branches(forest: Forest, slices: int) -> list[_Branch]:
    found = []
    taken: Counter[int] = Counter()
    for tree in forest.trees:
        depths, copies = tree.depths, tree.copies
        heights = dict.fromkeys(depths, 0)
        for parent, child in reversed(tree.edges):
            heights[parent] = max(heights[parent], heights[child] + 1)
        for p in range(slices):
            own = slices * taken[tree.root] + p * copies
            chunk = slices * tree.root * forest.share.trees + own
            for parent, child in tree.edges:
                first = own if parent == tree.root else None
                depth, height = depths[parent] + p, heights[child] + p
                found.append(_Branch(chunk, copies, first, parent, child, depth, height))
        taken[tree.root] += copies
    return found


def _distribute(w: Writer, forest: Forest, have_begun: bool, slices: int) -> None:
    """Add the steps that copy each root's chunks to the buffer `out` of all ranks.

    With `have_begun`, all ranks have begun the call, and each root's chunks are in its `out`, not its `in`.
    """
    branches = _branches(forest, slices)
    if not have_begun:
        pairs = sorted({(each.child, each.parent) for each in branches})
        for child, parent in pairs:
            w.signal(child, parent)
        chunks = slices * forest.share.trees
        for rank in range(w.ranks):
            w.copy(rank, Place("in", 0), Place("out", rank * chunks), chunks)
        for child, parent in pairs:
            w.wait(parent, child)
    for depth in range(1 + max(branch.depth for branch in branches)):
        messages = []
        for branch in branches:
            if branch.depth == depth:
                place = Place("out", branch.chunk)
                source = place if branch.own is None or have_begun else Place("in", branch.own)
                messages.append((branch.parent, branch.child, source, place, branch.n))
        _send(w, messages)


def _reduce(w: Writer, forest: Forest, collective: str, slices: int) -> int:
    """Add steps that sum each root's chunks over all ranks into its `out`. Return the size of `tmp`."""
    branches = sorted(_branches(forest, slices), key=lambda each: (each.height, each.child, each.chunk))
    # Each child's sum has a separate position in the parent's `tmp`.
    places: dict[tuple[int, int], Place] = {}
    used: Counter[int] = Counter()
    children: dict[tuple[int, int], list[_Branch]] = defaultdict(list)
    for branch in branches:
        places[branch.chunk, branch.child] = Place("tmp", used[branch.parent])
        used[branch.parent] += branch.n
        children[branch.chunk, branch.parent].append(branch)
    # This table maps a round to the sums whose last terms arrive in the previous round.
    sums: dict[int, list[list[_Branch]]] = defaultdict(list)
    for parts in children.values():
        sums[1 + max(part.height for part in parts)].append(sorted(parts, key=lambda p: p.child))
    for height in range(1 + max(sums)):
        for parts in sums[height]:
            chunk, n, own, parent, *_ = parts[0]
            first, *others = (places[chunk, part.child] for part in parts)
            into = first
            if own is not None:
                into = Place("out", own if collective == "reduce_scatter" else chunk)
            w.reduce(parent, [first, Place("in", chunk), *others], into, n)
        messages = []
        for branch in branches:
            if branch.height == height:
                held = Place("in", branch.chunk)
                if below := children.get((branch.chunk, branch.child)):
                    held = places[branch.chunk, min(part.child for part in below)]
                target = places[branch.chunk, branch.child]
                messages.append((branch.child, branch.parent, held, target, branch.n))
        _send(w, messages)
    return max(used.values())


def _send(w: Writer, messages: Iterable[tuple[int, int, Place, Place, int]]) -> None:
    """Add the puts, signals and waits for the messages of one round.

    A message is a tuple (rank, other rank, source, target, number of chunks).
    """
    pairs: dict[tuple[int, int], list[tuple[Place, Place, int]]] = defaultdict(list)
    for rank, other, source, target, n in sorted(messages):
        pieces = pairs[rank, other]
        if pieces:
            first_source, first_target, length = pieces[-1]
            after = (
                (first_source.buffer, first_source.chunk + length),
                (first_target.buffer, first_target.chunk + length),
            )
            if (source, target) == after:
                source, target, n = first_source, first_target, length + n
                pieces.pop()
        pieces.append((source, target, n))
    for (rank, other), pieces in pairs.items():
        for source, target, n in pieces:
            w.put(rank, other, source, target, n)
    for rank, other in pairs:
        w.signal(rank, other)
    for rank, other in pairs:
        w.wait(other, rank)
