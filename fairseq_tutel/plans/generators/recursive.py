"""Plans that double what is known in every trip. N ranks, rank r, trip t."""

from fairseq_tutel.plans.format import Plan, Writer


def recursive_doubling(collective: str, ranks: int, *, kind: str = "simple") -> Plan:
    """all_gather and all_reduce by doubling, reduce_scatter by halving; N is a power of two.

    A rank sends log2 N messages in as many trips: for all_gather of 1, 2, 4, … shards, (N-1) M bytes; for
    reduce_scatter of a half, a quarter, … of `in`, (N-1)/N M; for all_reduce of all of it, log2(N) M.
    An all_reduce adds the upper half of a group to the lower one, on every rank.

    Source: Thakur, Rabenseifner and Gropp 2005.

    Raises:
        ValueError: N is no power of two.
    """
    if ranks & (ranks - 1):
        raise ValueError(
            f"recursive_doubling needs a power of two, not {ranks} ranks; ring takes any number."
        )
    w = Writer(ranks, kind)
    trips = ranks.bit_length() - 1
    temporary = {
        "all_gather": ranks,
        "reduce_scatter": ranks - 1,
        "all_reduce": max(0, 2 * trips - 1),
    }
    of_rank = {"all_gather": _gather, "reduce_scatter": _halve, "all_reduce": _double}
    for r in range(ranks):
        of_rank[collective](w, r, trips)
    return w.plan(
        f"recursive_doubling {collective}", collective, 1, temporary=temporary[collective]
    )


def _gather(w: Writer, r: int, trips: int) -> None:
    w.copy(r, ("in", 0), ("tmp", r))
    for t in range(trips):
        first = r >> t << t
        w.put(r, r ^ 1 << t, ("tmp", first), ("tmp", first), 1 << t)
        w.signal(r, r ^ 1 << t)
        w.wait(r, r ^ 1 << t)
    w.copy(r, ("tmp", 0), ("out", 0), w.ranks)


def _halve(w: Writer, r: int, trips: int) -> None:
    if not trips:
        w.copy(r, ("in", 0), ("out", 0))
    # What is left to be added up: from chunk `at` of `held` on.
    held, at, arrives = "in", 0, 0
    for t in reversed(range(trips)):
        n, peer = 1 << t, r ^ 1 << t
        low, high = at, at + n
        own, leaves = (high, low) if r & n else (low, high)
        w.put(r, peer, (held, leaves), ("tmp", arrives), n)
        w.signal(r, peer)
        w.wait(r, peer)
        result = ("tmp", arrives) if t else ("out", 0)
        w.reduce(r, [("tmp", arrives), (held, own)], result, n)
        held, at, arrives = "tmp", arrives, arrives + n
    if trips:
        w.flush(r, r ^ w.ranks // 2)


def _double(w: Writer, r: int, trips: int) -> None:
    if not trips:
        w.copy(r, ("in", 0), ("out", 0))
    # The sum before trip t lies in tmp[2 t - 1], and what it brings in tmp[2 t].
    for t in range(trips):
        n, peer = 1 << t, r ^ 1 << t
        own, other = ("tmp", 2 * t - 1) if t else ("in", 0), ("tmp", 2 * t)
        w.put(r, peer, own, other)
        w.signal(r, peer)
        w.wait(r, peer)
        is_last = t == trips - 1
        result = ("out", 0) if is_last else ("tmp", 2 * t + 1)
        w.reduce(r, [other, own] if r & n else [own, other], result)
    if trips:
        w.flush(r, r ^ 1)


def tree(collective: str, ranks: int, *, root: int = 0, kind: str = "simple") -> Plan:
    """Broadcast or reduce by a binomial tree: ⌊log2 N⌋ trips, N - 1 messages of M bytes in all.

    Nothing else would hold back a sender that hears from nobody: each receiver first says that it began.
    A parent adds its children's sums to its own, in the order of the children's distances.
    """
    w = Writer(ranks, kind)
    slots = range(max(1, ranks - 1).bit_length())
    for r in range(ranks):
        # Ranks are seen from the root; a parent has the last bit of a child's cleared.
        seen = (r - root) % ranks
        bits = [k for k in slots if seen % (2 << k) == 0 and seen + (1 << k) < ranks]
        children = [(k, (r + (1 << k)) % ranks) for k in bits]
        last_bit = seen & -seen
        parent = (r - last_bit) % ranks if seen else None
        if collective == "broadcast":
            _broadcast(w, r, parent, [child for _, child in reversed(children)])
        else:
            _reduce(w, r, parent, children, last_bit.bit_length() - 1, len(slots))
    temporary = len(slots) + 1 if collective == "reduce" else 0
    return w.plan(f"tree {collective}", collective, 1, temporary=temporary, root=root)


def _broadcast(w: Writer, r: int, parent: int | None, children: list[int]) -> None:
    if parent is None:
        w.copy(r, ("in", 0), ("out", 0))
    else:
        w.signal(r, parent)
        w.wait(r, parent)
    for child in children:
        w.wait(r, child)
        w.put(r, child, ("in" if parent is None else "out", 0), ("out", 0))
        w.signal(r, child)
    for child in children:
        w.flush(r, child)


def _reduce(
    w: Writer, r: int, parent: int | None, children: list[tuple[int, int]], slot: int, slots: int
) -> None:
    for _, child in children:
        w.signal(r, child)
    for _, child in children:
        w.wait(r, child)
    parts = [("in", 0), *(("tmp", k) for k, _ in children)]
    if parent is None:
        w.reduce(r, parts, ("out", 0))
        return
    own = ("in", 0)
    if children:
        own = ("tmp", slots)
        w.reduce(r, parts, own)
    w.wait(r, parent)
    w.put(r, parent, own, ("tmp", slot))
    w.signal(r, parent)
    w.flush(r, parent)
