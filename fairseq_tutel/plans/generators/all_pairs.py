"""Each rank puts to each other rank, in one phase (1PA) or two (2PA). N ranks, rank r, peer p.

Source: MSCCL++ (Shah et al. 2025), section 5, for all_reduce. The other collectives are half of it.
"""

from collections.abc import Sequence

from fairseq_tutel.plans.format import REDUCING, Plan, Writer


def others(index: int, count: int) -> list[int]:
    """Return all other indices, beginning after this one, so that ranks send to different ones."""
    return [(index + distance) % count for distance in range(1, count)]


def one_phase(collective: str, ranks: int) -> Plan:
    """all_gather, reduce_scatter or all_reduce (1PA): put the needed chunks to each `tmp`, then sum.

    A rank sends N - 1 messages in one round. For all_gather and all_reduce each is its whole `in`, (N-1) M
    bytes in all; for reduce_scatter each is 1/N of it, (N-1)/N M in all. Sums are in the order of ranks.
    """
    return _all_to_each("one_phase", collective, ranks)


def linear(collective: str, ranks: int) -> Plan:
    """all_to_all: each rank puts to each other rank, N - 1 messages and (N-1)/N M bytes in one round."""
    return _all_to_each("linear", collective, ranks)


def _all_to_each(name: str, collective: str, ranks: int) -> Plan:
    w = Writer(ranks)
    # The distance between the chunks for two adjacent ranks.
    stride = int(collective in ("reduce_scatter", "all_to_all"))
    for r in range(ranks):
        own, peers = ("in", r * stride), others(r, ranks)
        for p in peers:
            w.put(r, p, ("in", p * stride), ("tmp", r))
            w.signal(r, p)
        if collective not in REDUCING:
            w.copy(r, own, ("out", r))
        for p in reversed(peers):
            w.wait(r, p)
        if collective in REDUCING:
            w.reduce(r, [own if p == r else ("tmp", p) for p in range(ranks)], ("out", 0))
        else:
            for first, end in ((0, r), (r + 1, ranks)):
                if first < end:
                    w.copy(r, ("tmp", first), ("out", first), end - first)
        for p in peers:
            w.flush(r, p)
    return w.plan(f"{name} {collective}", collective, 1, temporary=ranks)


def two_phase(collective: str, ranks: int) -> Plan:
    """all_reduce (2PA): reduce_scatter by all pairs, then all_gather by all pairs.

    A rank sends 2 (N-1) messages of M / N in two rounds, 2 (N-1)/N M bytes, which is the minimum for an
    all_reduce. Rank r sums chunk r in the order of ranks and sends the sum to all.
    """
    w = Writer(ranks)
    for r in range(ranks):
        scatter(w, r, range(ranks), r)
        w.reduce(r, [("in", r) if p == r else ("tmp", p) for p in range(ranks)], ("out", r))
        gather(w, r, range(ranks), r)
    return w.plan(f"two_phase {collective}", collective, ranks, temporary=ranks)


def scatter(w: Writer, rank: int, members: Sequence[int], own: int) -> None:
    """Put chunk i of `in` to tmp[own] of member i, and wait for theirs; the rank is member `own`."""
    peers = others(own, len(members))
    for i in peers:
        w.put(rank, members[i], ("in", i), ("tmp", own))
        w.signal(rank, members[i])
    for i in reversed(peers):
        w.wait(rank, members[i])


def gather(w: Writer, rank: int, members: Sequence[int], own: int) -> None:
    """Put out[own] to the members, which have begun the call, and wait for theirs."""
    peers = others(own, len(members))
    for i in peers:
        w.put(rank, members[i], ("out", own), ("out", own))
        w.signal(rank, members[i])
    for i in reversed(peers):
        w.wait(rank, members[i])
    for i in peers:
        w.flush(rank, members[i])
