"""Forests as plans: along trees ranks' shards come to all ranks, and sums of them to their roots.

N ranks, k trees of every root, P slices. A shard is P k chunks, of which a tree that is m times there has
P m, side by side, m in each slice. Ranks send in rounds, and all that one sends another in a round goes
with one signal: when a shard is handed out, a rank's round is its distance from the root, when parts are
added up its distance from the farthest leaf below it. Each slice is a round behind the one before: depth +
P - 1 rounds of a P-th of the bytes, in which a link has less to wait for. A chunk is summed at its root at
last, and on the way there in an order that is the plan's: after an all_reduce all ranks hold the same bits.

Whoever is put into has begun the call: its part is in the sum that it gets, or it has said so first.

Source of the trees: ForestColl (`plans.forestcoll.forest`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.forest import Forest
from fairseq_tutel.plans.format import Place, Plan, Writer


def forest(
    collective: str,
    adding: Forest | None,
    handing: Forest | None,
    *,
    kind: str = "simple",
    slices: int = 1,
) -> Plan:
    """Return a collective's plan over trees, as `plans.forestcoll.forest.grow_for` gives them.

    Args:
        collective: any but all_to_all.
        adding: the trees along which parts are added up, if they are.
        handing: those along which shards, or sums, are handed out, if they are.
        kind: of its channels.
        slices: P.
    """
    if handing:
        one, network = handing, handing.network
    else:
        assert adding, "a collective adds up or hands out"
        one, network = adding, adding.network.reversed
    chunks = slices * one.share.trees
    w = Writer(network.ranks, kind)
    temporary = _add_up(w, adding, collective, slices) if adding else 0
    if handing:
        _hand_out(w, handing, bool(adding), slices)
    written = {step.channel for lanes in w.lanes for step in lanes[0] if step.op == "put"}
    for (source, target, _), channel in w.channels.items():
        if channel in written:
            w.flush(source, target)
    return w.plan(
        f"forest {collective}, {network.name}",
        collective,
        chunks * (network.ranks if collective == "all_reduce" else 1),
        temporary=temporary,
        root=one.root,
        network=network.digest,
        cut=str(one.best.seconds),
    )


class _Branch(NamedTuple):
    """An edge of a tree, of one slice, which is p rounds behind the first.

    Attributes:
        tree: the number of the first of its chunks, in all shards.
        n: how many chunks it has.
        own: the number of the first one in its root's shard; None where the parent is not the root.
        parent: nearer to the root.
        child: farther from it.
        depth: the parent's distance from the root, plus p.
        height: the child's distance from the farthest leaf below it, plus p.
    """

    tree: int
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
        depths = tree.depths
        heights = dict.fromkeys(depths, 0)
        for parent, child in reversed(tree.edges):
            heights[parent] = max(heights[parent], heights[child] + 1)
        own = slices * taken[tree.root]
        taken[tree.root] += tree.copies
        first = own + (slices * tree.root * forest.share.trees if forest.root is None else 0)
        found += [
            _Branch(
                tree=first + p * tree.copies,
                n=tree.copies,
                own=own + p * tree.copies if parent == tree.root else None,
                parent=parent,
                child=child,
                depth=depths[parent] + p,
                height=heights[child] + p,
            )
            for p in range(slices)
            for parent, child in tree.edges
        ]
    return found


def _hand_out(w: Writer, forest: Forest, begun: bool, slices: int) -> None:
    """Bring every root's chunks to `out` of all ranks: from its `in`, or if all have begun its `out`."""
    branches = _branches(forest, slices)
    if not begun:
        told = sorted({(each.child, each.parent) for each in branches})
        _tell(w, told)
        chunks = slices * forest.share.trees
        for rank in range(w.ranks) if forest.root is None else [forest.root]:
            first = 0 if forest.root == rank else rank * chunks
            w.copy(rank, Place("in", 0), Place("out", first), chunks)
        _hear(w, told)
    for depth in range(1 + max(branch.depth for branch in branches)):
        messages = []
        for branch in branches:
            if branch.depth == depth:
                place = Place("out", branch.tree)
                source = place if branch.own is None or begun else Place("in", branch.own)
                messages.append((branch.parent, branch.child, source, place, branch.n))
        _send(w, messages)


def _add_up(w: Writer, forest: Forest, collective: str, slices: int) -> int:
    """Bring the sum of every root's chunks of `in` to its `out`; return the size of `tmp`."""
    branches = sorted(
        _branches(forest, slices), key=lambda each: (each.height, each.child, each.tree)
    )
    # A sum comes to the parent's `tmp`, where each has a place of its own.
    places: dict[tuple[int, int], Place] = {}
    used: Counter[int] = Counter()
    children: dict[tuple[int, int], list[_Branch]] = defaultdict(list)
    for branch in branches:
        places[branch.tree, branch.child] = Place("tmp", used[branch.parent])
        used[branch.parent] += branch.n
        children[branch.tree, branch.parent].append(branch)
    # By the round before which all parts are there.
    sums: dict[int, list[list[_Branch]]] = defaultdict(list)
    for parts in children.values():
        sums[1 + max(part.height for part in parts)].append(sorted(parts, key=lambda p: p.child))
    if collective == "reduce":
        told = sorted({(each.parent, each.child) for each in branches})
        _tell(w, told)
        _hear(w, told)
    for height in range(1 + max(sums)):
        for parts in sums[height]:
            tree, n, own, parent, *_ = parts[0]
            arrived = [places[tree, part.child] for part in parts]
            into = arrived[0]
            if own is not None:
                into = Place("out", own if collective == "reduce_scatter" else tree)
            w.reduce(parent, [arrived[0], Place("in", tree), *arrived[1:]], into, n)
        messages = []
        for tree, n, _, parent, child, _, level in branches:
            if level == height:
                below = children.get((tree, child))
                held = Place("in", tree)
                if below:
                    held = places[tree, min(part.child for part in below)]
                messages.append((child, parent, held, places[tree, child], n))
        _send(w, messages)
    return max(used.values())


def _tell(w: Writer, pairs: Iterable[tuple[int, int]]) -> None:
    """Let ranks tell others that they have begun."""
    for rank, other in pairs:
        w.signal(rank, other)


def _hear(w: Writer, pairs: Iterable[tuple[int, int]]) -> None:
    """Let those others wait for it, before anything else that comes from there."""
    for rank, other in pairs:
        w.wait(other, rank)


def _send(w: Writer, messages: Iterable[tuple[int, int, Place, Place, int]]) -> None:
    """Let ranks put and wait, for all messages (rank, to whom, from where, to where, chunks) of a round."""
    pairs: dict[tuple[int, int], list[tuple[Place, Place, int]]] = defaultdict(list)
    for rank, other, source, target, n in sorted(messages):
        pieces = pairs[rank, other]
        if pieces:
            last, there, before = pieces[-1]
            goes_on = (source, target) == (
                Place(last.buffer, last.chunk + before),
                Place(there.buffer, there.chunk + before),
            )
            if goes_on:
                pieces[-1] = (last, there, before + n)
                continue
        pieces.append((source, target, n))
    for (rank, other), pieces in pairs.items():
        for source, target, n in pieces:
            w.put(rank, other, source, target, n)
    _tell(w, pairs)
    _hear(w, pairs)
