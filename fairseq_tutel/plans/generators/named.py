"""Generators make collective plans from well-known algorithms.

N ranks are on n nodes of L ranks. r is a rank, t is a round, and M is the number of bytes in a rank's `in`.
docs/plans.md has a table of each plan's bytes and rounds.
"""

from collections.abc import Sequence

from fairseq_tutel.plans.format import REDUCING, Chunk, Plan, Writer


def ring(collective: str, ranks: int) -> Plan:
    """Return a ring plan for all_gather, reduce_scatter or all_reduce.

    In each round, a rank sends a chunk to the next rank. Chunk c is summed along the ring from rank c + 1
    to rank c. The all_reduce (2PR) is a reduce_scatter and then an all_gather (Patarasuk and Yuan 2009).
    """
    w = Writer(ranks)
    for r in range(ranks):
        if collective == "all_gather":
            w.signal(r, (r - 1) % ranks)
            w.copy(r, ("in", 0), ("out", r))
            w.wait(r, (r + 1) % ranks)
            _pass_on(w, r, ("in", 0))
        elif collective == "reduce_scatter":
            _sum_along(w, r, ("out", 0))
        else:
            _sum_along(w, r, ("out", r))
            # In the ring all_reduce, the last sum includes data of the next rank, so the next rank has
            # begun the call.
            _pass_on(w, r, ("out", r))
        w.flush(r, (r + 1) % ranks)
    chunks = ranks if collective == "all_reduce" else 1
    temporary = 0 if collective == "all_gather" else ranks - 1
    return w.plan(f"ring {collective}", collective, chunks, temporary=temporary)


def _sum_along(w: Writer, r: int, result: Chunk) -> None:
    """Add rank r's steps of a ring reduce_scatter, of which the last writes the sum of chunk r to `result`.

    In round t, rank r receives a chunk or partial sum in tmp[t].
    """
    for t in range(w.ranks - 1):
        leaves = ("tmp", t - 1) if t else ("in", (r - 1) % w.ranks)
        w.send(r, (r + 1) % w.ranks, leaves, ("tmp", t))
        w.wait(r, (r - 1) % w.ranks)
        own = ("in", (r - 2 - t) % w.ranks)
        w.reduce(r, [("tmp", t), own], result if t == w.ranks - 2 else ("tmp", t))


def _pass_on(w: Writer, r: int, own: Chunk) -> None:
    """Add steps in which rank r puts its chunk `own`, and then each arrived chunk, to the next rank."""
    for t in range(w.ranks - 1):
        leaves = (r - t) % w.ranks
        w.send(r, (r + 1) % w.ranks, ("out", leaves) if t else own, ("out", leaves))
        w.wait(r, (r - 1) % w.ranks)


def all_pairs(collective: str, ranks: int) -> Plan:
    """Return a one-phase plan: each rank puts chunks to other ranks' `tmp`, which these ranks copy or add.

    Each sum adds in the order of ranks. The all_reduce is the algorithm 1PA of MSCCL++ (Shah et al. 2025),
    whose section 5 also describes `two_phase` (2PA) and `hierarchical` (2PH).
    """
    w = Writer(ranks)
    # The distance in `in` between the chunks for adjacent ranks; 0 if all ranks get the same chunk.
    stride = int(collective in ("reduce_scatter", "all_to_all"))
    for r in range(ranks):
        own, sources = ("in", r * stride), [("in", p * stride) for p in range(ranks)]
        peers = _send_to_each(w, r, range(ranks), sources, ("tmp", r))
        if collective not in REDUCING:
            w.copy(r, own, ("out", r))
        _wait_for_each(w, r, peers)
        if collective in REDUCING:
            w.reduce(r, [own if p == r else ("tmp", p) for p in range(ranks)], ("out", 0))
        else:
            _copy_but(w, r, 0, range(r, r + 1))
        _flush_each(w, r, peers)
    name = "linear" if collective == "all_to_all" else "one_phase"
    return w.plan(f"{name} {collective}", collective, 1, temporary=ranks)


def two_phase(collective: str, ranks: int) -> Plan:
    """Return a two-phase all_reduce plan, in which rank r sums chunk r and sends the sum to all ranks.

    Each sum adds in the order of ranks. A rank sends 2 (N-1)/N M bytes, the minimum for an all_reduce.
    """
    w = Writer(ranks)
    for r in range(ranks):
        parts = _scatter(w, r, range(ranks))
        w.reduce(r, parts, ("out", r))
        peers = _send_to_each(w, r, range(ranks), [("out", r)] * ranks, ("out", r))
        _wait_for_each(w, r, peers)
        _flush_each(w, r, peers)
    return w.plan(f"two_phase {collective}", collective, ranks, temporary=ranks)


def hierarchical(collective: str, ranks: int, *, nodes: int) -> Plan:
    """Return a hierarchical all_reduce plan, which sums within nodes and then across nodes.

    The phases are a reduce_scatter within each node, an exchange of 1/L of the data across nodes, and
    an all_gather within each node. Sums add the ranks of a node in order, then the nodes in order.
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        node, alike = range(a * local, (a + 1) * local), range(i, ranks, local)
        # tmp[local + b] gets the sum of chunk i over the ranks of node b.
        w.reduce(r, _scatter(w, r, node), ("tmp", local + a))
        others = _send_to_each(w, r, alike, [("tmp", local + a)] * nodes, ("tmp", local + a))
        _wait_for_each(w, r, others)
        w.reduce(r, [("tmp", local + b) for b in range(nodes)], ("out", i))
        peers = _send_to_each(w, r, node, [("out", i)] * local, ("out", i))
        _wait_for_each(w, r, peers)
        _flush_each(w, r, peers)
    return w.plan(f"hierarchical {collective}", collective, local, temporary=local + nodes)


def two_hops(collective: str, ranks: int, *, nodes: int) -> Plan:
    """Return a 2-D hierarchical all_to_all plan (2DH), with a hop within nodes and a hop between nodes.

    The first hop goes to the rank of the same node that has the destination rank's local index. In a 2DH
    plan, a rank sends n - 1 messages of L chunks to other nodes, while `linear` sends (n - 1) L messages of
    one chunk. 2DH is from Tutel (Hwang et al. 2023).
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        peers = [a * local + j for j in _others(i, local)]
        others = [b * local + i for b in _others(a, nodes)]
        # Chunks from rank (a, j) to rank (b, i) pass through tmp[b * local + j] of rank (a, i).
        for p in peers:
            for b in range(nodes):
                w.put(r, p, ("in", b * local + p % local), ("tmp", b * local + i))
            w.signal(r, p)
        for b in range(nodes):
            w.copy(r, ("in", b * local + i), ("tmp", b * local + i))
        _wait_for_each(w, r, peers)
        # The chunks of node a's ranks start at tmp[ranks + a * local], in the order of ranks.
        for p in others:
            w.send(r, p, ("tmp", p - i), ("tmp", ranks + a * local), local)
        w.copy(r, ("tmp", a * local), ("out", a * local), local)
        _wait_for_each(w, r, others)
        _copy_but(w, r, ranks, range(a * local, (a + 1) * local))
        _flush_each(w, r, peers)
    return w.plan(f"two_hops {collective}", collective, 1, temporary=2 * ranks)


def _others(index: int, count: int) -> list[int]:
    """Return all indices below `count` except `index`, in cyclic order, starting after `index`."""
    # In this cyclic order, ranks send to different peers at the same time.
    return [(index + distance) % count for distance in range(1, count)]


def _send_to_each(
    w: Writer, rank: int, members: Sequence[int], sources: Sequence[Chunk], target: Chunk
) -> list[int]:
    """Add steps that send sources[i] to `target` on the i-th rank of a group; return the other ranks."""
    others = _others(members.index(rank), len(members))
    for i in others:
        w.send(rank, members[i], sources[i], target)
    return [members[i] for i in others]


def _scatter(w: Writer, rank: int, members: Sequence[int]) -> list[Chunk]:
    """Add steps that send chunk i of `in` to the i-th rank; return the chunks that this rank sums."""
    own, count = members.index(rank), len(members)
    peers = _send_to_each(w, rank, members, [("in", i) for i in range(count)], ("tmp", own))
    _wait_for_each(w, rank, peers)
    return [("in", own) if i == own else ("tmp", i) for i in range(count)]


def _wait_for_each(w: Writer, rank: int, peers: Sequence[int]) -> None:
    for peer in reversed(peers):
        w.wait(rank, peer)


def _flush_each(w: Writer, rank: int, peers: Sequence[int]) -> None:
    for peer in peers:
        w.flush(rank, peer)


def _copy_but(w: Writer, rank: int, start: int, skipped: range) -> None:
    """Add copies of tmp[start + p] to out[p] for all ranks p that are not in `skipped`."""
    for first, end in ((0, skipped.start), (skipped.stop, w.ranks)):
        if first < end:
            w.copy(rank, ("tmp", start + first), ("out", first), end - first)
