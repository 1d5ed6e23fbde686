"""Plans whose messages double or halve in each round. N ranks, rank r, round t."""

from fairseq_tutel.plans.format import Plan, Writer


def recursive_doubling(collective: str, ranks: int) -> Plan:
    """all_gather and all_reduce by doubling, reduce_scatter by halving; N is a power of two.

    A rank sends log2 N messages in as many rounds. For all_gather they have 1, 2, 4, … shards, (N-1) M;
    for reduce_scatter a half, a quarter, … of `in`, (N-1)/N M; for all_reduce all of it, log2(N) M.
    An all_reduce adds a group's upper half to its lower half, on each rank.

    Source: Thakur, Rabenseifner and Gropp 2005.
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
        "all_reduce": (_double, max(0, 2 * rounds - 1)),
    }[collective]
    for r in range(ranks):
        write(w, r, rounds)
    return w.plan(f"recursive_doubling {collective}", collective, 1, temporary=temporary)


def _gather(w: Writer, r: int, rounds: int) -> None:
    w.copy(r, ("in", 0), ("tmp", r))
    for t in range(rounds):
        first = r >> t << t
        w.put(r, r ^ 1 << t, ("tmp", first), ("tmp", first), 1 << t)
        w.signal(r, r ^ 1 << t)
        w.wait(r, r ^ 1 << t)
    w.copy(r, ("tmp", 0), ("out", 0), w.ranks)


def _halve(w: Writer, r: int, rounds: int) -> None:
    if not rounds:
        w.copy(r, ("in", 0), ("out", 0))
    # The chunks that are still to be summed begin at chunk `at` of `held`.
    held, at, arrives = "in", 0, 0
    for t in reversed(range(rounds)):
        n, peer = 1 << t, r ^ 1 << t
        low, high = at, at + n
        own, leaves = (high, low) if r & n else (low, high)
        w.put(r, peer, (held, leaves), ("tmp", arrives), n)
        w.signal(r, peer)
        w.wait(r, peer)
        result = ("tmp", arrives) if t else ("out", 0)
        w.reduce(r, [("tmp", arrives), (held, own)], result, n)
        held, at, arrives = "tmp", arrives, arrives + n
    if rounds:
        w.flush(r, r ^ w.ranks // 2)


def _double(w: Writer, r: int, rounds: int) -> None:
    if not rounds:
        w.copy(r, ("in", 0), ("out", 0))
    # tmp[2 t - 1] holds the sum before round t, tmp[2 t] the peer's sum.
    for t in range(rounds):
        n, peer = 1 << t, r ^ 1 << t
        own, other = ("tmp", 2 * t - 1) if t else ("in", 0), ("tmp", 2 * t)
        w.put(r, peer, own, other)
        w.signal(r, peer)
        w.wait(r, peer)
        is_last = t == rounds - 1
        result = ("out", 0) if is_last else ("tmp", 2 * t + 1)
        w.reduce(r, [other, own] if r & n else [own, other], result)
    if rounds:
        w.flush(r, r ^ 1)


def tree(collective: str, ranks: int, *, root: int = 0) -> Plan:
    """Broadcast or reduce by a binomial tree: ⌊log2 N⌋ rounds, N - 1 messages of M bytes in all.

    Each receiver first signals that it has begun, since a sender may hear nothing else from it.
    A parent adds its children's sums to its own data, in the order of the children's distances.
    """
    w = Writer(ranks)
    slots = range(max(1, ranks - 1).bit_length())
    for r in range(ranks):
        # Ranks are relative to the root. A parent's rank is its child's without the lowest set bit.
        relative = (r - root) % ranks
        bits = [k for k in slots if relative % (2 << k) == 0 and relative + (1 << k) < ranks]
        children = [(k, (r + (1 << k)) % ranks) for k in bits]
        last_bit = relative & -relative
        parent = (r - last_bit) % ranks if relative else None
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
