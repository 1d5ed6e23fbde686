"""Every rank puts to every other one: in one phase (1PA), and in two (2PA). N ranks, rank r, peer p.

Source: MSCCL++ (Shah et al. 2025), section 5, of its all_reduce; the others are a half of it.
"""

from fairseq_tutel.plans.format import REDUCING, Plan, Writer


def others(index: int, count: int) -> list[int]:
    """Return everyone but one, from its neighbour on: in the first place all send to different ones."""
    return [(index + distance) % count for distance in range(1, count)]


def one_phase(collective: str, ranks: int, *, kind: str = "simple") -> Plan:
    """all_gather, reduce_scatter or all_reduce (1PA): put what everyone needs to its `tmp`, then add up.

    A rank sends N - 1 messages in one trip: each of its whole `in`, (N-1) M bytes, for all_gather and
    all_reduce, and of 1/N of it for reduce_scatter, (N-1)/N M. Sums are in the order of ranks.
    """
    return _all_to_each("one_phase", collective, ranks, kind)


def linear(collective: str, ranks: int, *, kind: str = "simple") -> Plan:
    """all_to_all: every rank puts to every other one, N - 1 messages and (N-1)/N M bytes in one trip."""
    return _all_to_each("linear", collective, ranks, kind)


def _all_to_each(name: str, collective: str, ranks: int, kind: str) -> Plan:
    w = Writer(ranks, kind)
    stride = int(
        collective in ("reduce_scatter", "all_to_all")
    )  # from one's chunk to the next one's
    for r in range(ranks):
        own = ("in", r * stride)
        for p in others(r, ranks):
            w.put(r, p, ("in", p * stride), ("tmp", r))
            w.signal(r, p)
        if collective not in REDUCING:
            w.copy(r, own, ("out", r))
        for p in reversed(others(r, ranks)):
            w.wait(r, p)
        if collective in REDUCING:
            w.reduce(r, [own if p == r else ("tmp", p) for p in range(ranks)], ("out", 0))
        else:
            for first, end in ((0, r), (r + 1, ranks)):
                if first < end:
                    w.copy(r, ("tmp", first), ("out", first), end - first)
        for p in others(r, ranks):
            w.flush(r, p)
    return w.plan(f"{name} {collective}", collective, 1, temporary=ranks)


def two_phase(collective: str, ranks: int, *, kind: str = "simple") -> Plan:
    """all_reduce (2PA): reduce_scatter by all pairs, then all_gather by all pairs.

    A rank sends 2 (N-1) messages of M / N in two trips, 2 (N-1)/N M bytes: no all_reduce sends fewer.
    Rank r adds up chunk r, in the order of ranks, and all get its sum.
    """
    w = Writer(ranks, kind)
    for r in range(ranks):
        scatter(w, r, range(ranks), r)
        w.reduce(r, [("in", r) if p == r else ("tmp", p) for p in range(ranks)], ("out", r))
        gather(w, r, range(ranks), r)
    return w.plan(f"two_phase {collective}", collective, ranks, temporary=ranks)


def scatter(w: Writer, rank: int, members: range, own: int) -> None:
    """Put chunk i of `in` to the i-th member's tmp[own], where the rank is the own-th, and await theirs."""
    peers = others(own, len(members))
    for i in peers:
        w.put(rank, members[i], ("in", i), ("tmp", own))
        w.signal(rank, members[i])
    for i in reversed(peers):
        w.wait(rank, members[i])


def gather(w: Writer, rank: int, members: range, own: int) -> None:
    """Put out[own] to the members, who are known to have begun, and await theirs."""
    peers = others(own, len(members))
    for i in peers:
        w.put(rank, members[i], ("out", own), ("out", own))
        w.signal(rank, members[i])
    for i in reversed(peers):
        w.wait(rank, members[i])
    for i in peers:
        w.flush(rank, members[i])
