"""Well-known collectives: N ranks on n nodes of L, rank r, round t; M bytes of a rank's `in`.

docs/plans.md has a table of their messages and rounds.
"""

from collections.abc import Sequence

from fairseq_tutel.plans.format import REDUCING, Chunk, Plan, Writer


def ring(collective: str, ranks: int) -> Plan:
    """all_gather, reduce_scatter or all_reduce (2PR), which is the other two in a row.

    Each round a rank sends a shard to the next one. Chunk c is summed along the ring, from rank c + 1 to
    rank c. Source: Patarasuk and Yuan 2009.
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
            # The last sum includes data of the next rank, so that rank has begun.
            _pass_on(w, r, ("out", r))
        w.flush(r, (r + 1) % ranks)
    chunks = ranks if collective == "all_reduce" else 1
    temporary = 0 if collective == "all_gather" else ranks - 1
    return w.plan(f"ring {collective}", collective, chunks, temporary=temporary)


def _sum_along(w: Writer, r: int, result: Chunk) -> None:
    """Sum chunk r of all ranks in `result`; round t's data arrives in tmp[t]."""
    for t in range(w.ranks - 1):
        leaves = ("tmp", t - 1) if t else ("in", (r - 1) % w.ranks)
        w.send(r, (r + 1) % w.ranks, leaves, ("tmp", t))
        w.wait(r, (r - 1) % w.ranks)
        own = ("in", (r - 2 - t) % w.ranks)
        w.reduce(r, [("tmp", t), own], result if t == w.ranks - 2 else ("tmp", t))


def _pass_on(w: Writer, r: int, own: Chunk) -> None:
    """Bring each rank's `own` to out[rank] of all others."""
    for t in range(w.ranks - 1):
        leaves = (r - t) % w.ranks
        w.send(r, (r + 1) % w.ranks, ("out", leaves) if t else own, ("out", leaves))
        w.wait(r, (r - 1) % w.ranks)


def recursive_doubling(collective: str, ranks: int) -> Plan:
    """all_gather and all_reduce by doubling, reduce_scatter by halving; N is a power of two.

    The log2 N messages have 1, 2, 4, … shards for all_gather, a half, a quarter, … of `in` for
    reduce_scatter, and all of it for all_reduce, which adds a group's upper half to its lower half, on each
    rank. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    if ranks & (ranks - 1):
        raise ValueError(
            f"recursive_doubling needs a power of two, not {ranks} ranks; ring takes any number."
        )
    w = Writer(ranks)
    rounds = ranks.bit_length() - 1
    write, temporary = {
        "all_gather": (_gather, ranks),
        "reduce_scatter": (_halve, ranks - 1),
        "all_reduce": (_double, 2 * rounds - 1),
    }[collective]
    for r in range(ranks):
        write(w, r, rounds)
    return w.plan(f"recursive_doubling {collective}", collective, 1, temporary=temporary)


def _gather(w: Writer, r: int, rounds: int) -> None:
    w.copy(r, ("in", 0), ("tmp", r))
    for t in range(rounds):
        first = r >> t << t
        w.send(r, r ^ 1 << t, ("tmp", first), ("tmp", first), 1 << t)
        w.wait(r, r ^ 1 << t)
    w.copy(r, ("tmp", 0), ("out", 0), w.ranks)


def _halve(w: Writer, r: int, rounds: int) -> None:
    # The chunks that are still to be summed begin at chunk `at` of `held`.
    held, at, arrives = "in", 0, 0
    for t in reversed(range(rounds)):
        n, peer = 1 << t, r ^ 1 << t
        low, high = at, at + n
        own, leaves = (high, low) if r & n else (low, high)
        w.send(r, peer, (held, leaves), ("tmp", arrives), n)
        w.wait(r, peer)
        result = ("tmp", arrives) if t else ("out", 0)
        w.reduce(r, [("tmp", arrives), (held, own)], result, n)
        held, at, arrives = "tmp", arrives, arrives + n
    w.flush(r, r ^ w.ranks // 2)


def _double(w: Writer, r: int, rounds: int) -> None:
    # tmp[2 t - 1] holds the sum before round t, tmp[2 t] the peer's sum.
    for t in range(rounds):
        n, peer = 1 << t, r ^ 1 << t
        own, other = ("tmp", 2 * t - 1) if t else ("in", 0), ("tmp", 2 * t)
        w.send(r, peer, own, other)
        w.wait(r, peer)
        result = ("out", 0) if t == rounds - 1 else ("tmp", 2 * t + 1)
        w.reduce(r, [other, own] if r & n else [own, other], result)
    w.flush(r, r ^ 1)


def all_pairs(collective: str, ranks: int) -> Plan:
    """all_gather, reduce_scatter, all_reduce (1PA), all_to_all: put chunks to each `tmp`, then copy or sum.

    Sums are in the order of ranks. Source of this, two_phase and hierarchical: MSCCL++ (Shah et al. 2025),
    section 5, for all_reduce.
    """
    w = Writer(ranks)
    # The distance between the chunks for two adjacent ranks.
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
    """all_reduce (2PA): rank r sums chunk r in the order of ranks and sends the sum to all.

    A rank sends 2 (N-1)/N M bytes, which is the minimum for an all_reduce.
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
    """all_reduce (2PH): in-node reduce_scatter, exchange of a 1/L slice across nodes, in-node all_gather.

    Slice i is the sum over nodes, in order, of the sums over each node's ranks, in order.
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        node, alike = range(a * local, (a + 1) * local), range(i, ranks, local)
        # tmp[local + node] holds that node's sum of slice i.
        w.reduce(r, _scatter(w, r, node), ("tmp", local + a))
        others = _send_to_each(w, r, alike, [("tmp", local + a)] * nodes, ("tmp", local + a))
        _wait_for_each(w, r, others)
        w.reduce(r, [("tmp", local + b) for b in range(nodes)], ("out", i))
        peers = _send_to_each(w, r, node, [("out", i)] * local, ("out", i))
        _wait_for_each(w, r, peers)
        _flush_each(w, r, peers)
    return w.plan(f"hierarchical {collective}", collective, local, temporary=local + nodes)


def two_hops(collective: str, ranks: int, *, nodes: int) -> Plan:
    """all_to_all (2DH): within a node to the rank with the destination's local index, then across nodes.

    To other nodes a rank sends n - 1 messages of L chunks, where `linear` sends (n-1) L smaller ones.
    Source: Tutel (Hwang et al. 2023), section 3.4.
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        peers = [a * local + j for j in _others(i, local)]
        others = [b * local + i for b in _others(a, nodes)]
        # Chunks from (a, j) to (b, i) pass through tmp[b, j] of (a, i).
        for p in peers:
            for b in range(nodes):
                w.put(r, p, ("in", b * local + p % local), ("tmp", b * local + i))
            w.signal(r, p)
        for b in range(nodes):
            w.copy(r, ("in", b * local + i), ("tmp", b * local + i))
        _wait_for_each(w, r, peers)
        # Chunks from node a arrive in tmp[ranks + a * local], in the order of sources.
        for p in others:
            w.send(r, p, ("tmp", p - i), ("tmp", ranks + a * local), local)
        w.copy(r, ("tmp", a * local), ("out", a * local), local)
        _wait_for_each(w, r, others)
        _copy_but(w, r, ranks, range(a * local, (a + 1) * local))
        _flush_each(w, r, peers)
    return w.plan(f"two_hops {collective}", collective, 1, temporary=2 * ranks)


def _others(index: int, count: int) -> list[int]:
    """Return all other indices, beginning after this one, so that ranks send to different ones."""
    return [(index + distance) % count for distance in range(1, count)]


def _send_to_each(
    w: Writer, rank: int, members: Sequence[int], sources: Sequence[Chunk], target: Chunk
) -> list[int]:
    """Send source i to `target` of the i-th of a rank's group; return the other members."""
    others = _others(members.index(rank), len(members))
    for i in others:
        w.send(rank, members[i], sources[i], target)
    return [members[i] for i in others]


def _scatter(w: Writer, rank: int, members: Sequence[int]) -> list[Chunk]:
    """Send chunk i of `in` to the i-th of a rank's group; return the places of all members' chunks."""
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
    """Copy tmp[start + p] to out[p] for all ranks p that are not skipped."""
    for first, end in ((0, skipped.start), (skipped.stop, w.ranks)):
        if first < end:
            w.copy(rank, ("tmp", start + first), ("out", first), end - first)
