"""Rings: each rank sends only to the next one, N - 1 times. N ranks, rank r, round t."""

from fairseq_tutel.plans.format import Plan, Writer


def ring(collective: str, ranks: int) -> Plan:
    """all_gather, reduce_scatter or all_reduce (2PR), which is the other two in a row.

    A rank sends one message in each round: for all_gather N - 1 of a shard, (N-1) M bytes; for
    reduce_scatter N - 1 of M / N; for all_reduce both, 2 (N-1)/N M bytes in 2 (N-1) rounds. Chunk c is
    summed along the ring, from rank c + 1 to rank c.

    Source: Patarasuk and Yuan 2009.
    """
    w = Writer(ranks)
    for r in range(ranks):
        if collective == "all_gather":
            _gather(w, r)
        elif collective == "reduce_scatter":
            _scatter(w, r, ("out", 0))
        else:
            _scatter(w, r, ("out", r))
            # The last sum includes data of the next rank, so that rank has begun.
            _pass_on(w, r, ("out", r))
        if ranks > 1:
            w.flush(r, (r + 1) % ranks)
    chunks = ranks if collective == "all_reduce" else 1
    temporary = 0 if collective == "all_gather" else ranks - 1
    return w.plan(f"ring {collective}", collective, chunks, temporary=temporary)


def _gather(w: Writer, r: int) -> None:
    if w.ranks > 1:
        w.signal(r, (r - 1) % w.ranks)
    w.copy(r, ("in", 0), ("out", r))
    if w.ranks > 1:
        w.wait(r, (r + 1) % w.ranks)
    _pass_on(w, r, ("in", 0))


def _scatter(w: Writer, r: int, result: tuple[str, int]) -> None:
    """Sum chunk r of all ranks in `result`; round t's data arrives in tmp[t]."""
    if w.ranks == 1:
        w.copy(r, ("in", r), result)
    for t in range(w.ranks - 1):
        leaves = ("tmp", t - 1) if t else ("in", (r - 1) % w.ranks)
        w.put(r, (r + 1) % w.ranks, leaves, ("tmp", t))
        w.signal(r, (r + 1) % w.ranks)
        w.wait(r, (r - 1) % w.ranks)
        is_last = t == w.ranks - 2
        own = ("in", (r - 2 - t) % w.ranks)
        w.reduce(r, [("tmp", t), own], result if is_last else ("tmp", t))


def _pass_on(w: Writer, r: int, own: tuple[str, int]) -> None:
    """Bring each rank's `own` to out[rank] of all others."""
    for t in range(w.ranks - 1):
        leaves = (r - t) % w.ranks
        w.put(r, (r + 1) % w.ranks, ("out", leaves) if t else own, ("out", leaves))
        w.signal(r, (r + 1) % w.ranks)
        w.wait(r, (r - 1) % w.ranks)
