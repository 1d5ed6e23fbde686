"""Plans written by hand, as small as they can be, for tests of what runs them."""

from collections.abc import Callable

from fairseq_tutel.planning.plan import Place, Plan, Writer


def others(rank: int, ranks: int) -> list[int]:
    return [(rank + i) % ranks for i in range(1, ranks)]


def all_reduce(ranks: int, **fields) -> Plan:
    """All put all they have to all others, who add up in the order of ranks."""
    writer = Writer(ranks)
    for rank in range(ranks):
        for other in others(rank, ranks):
            writer.put(rank, other, ("in", 0), ("tmp", rank))
            writer.signal(rank, other)
        for other in others(rank, ranks):
            writer.wait(rank, other)
        places = [Place("in", 0) if r == rank else Place("tmp", r) for r in range(ranks)]
        writer.reduce(rank, places, ("out", 0))
    return writer.plan("1pa", "all_reduce", 1, temporary=ranks, **fields)


def reduce_scatter(ranks: int, **fields) -> Plan:
    """As `all_reduce`, a shard each."""
    writer = Writer(ranks)
    for rank in range(ranks):
        for other in others(rank, ranks):
            writer.put(rank, other, ("in", other), ("tmp", rank))
            writer.signal(rank, other)
        for other in others(rank, ranks):
            writer.wait(rank, other)
        places = [Place("in", r) if r == rank else Place("tmp", r) for r in range(ranks)]
        writer.reduce(rank, places, ("out", 0))
    return writer.plan("direct", "reduce_scatter", 1, temporary=ranks, **fields)


def all_gather(ranks: int, chunks: int = 3, **fields) -> Plan:
    """A ring, in shards of several chunks."""
    writer = Writer(ranks)
    for rank in range(ranks):
        nxt, before = (rank + 1) % ranks, (rank - 1) % ranks
        writer.copy(rank, ("in", 0), ("out", rank * chunks), chunks)
        if ranks == 1:
            continue
        writer.put(rank, nxt, ("in", 0), ("tmp", 0), chunks)
        for turn in range(ranks - 1):
            at = (rank - 1 - turn) % ranks
            writer.signal(rank, nxt)
            writer.wait(rank, before)
            if turn < ranks - 2:
                writer.put(rank, nxt, ("tmp", turn * chunks), ("tmp", (turn + 1) * chunks), chunks)
            writer.copy(rank, ("tmp", turn * chunks), ("out", at * chunks), chunks)
    return writer.plan("ring", "all_gather", chunks, temporary=(ranks - 1) * chunks, **fields)


def all_to_all(ranks: int, **fields) -> Plan:
    """Linear: every block in one hop."""
    writer = Writer(ranks)
    for rank in range(ranks):
        writer.copy(rank, ("in", rank), ("out", rank))
        for other in others(rank, ranks):
            writer.put(rank, other, ("in", other), ("tmp", rank))
            writer.signal(rank, other)
        for other in others(rank, ranks):
            writer.wait(rank, other)
            writer.copy(rank, ("tmp", other), ("out", other))
    return writer.plan("direct", "all_to_all", 1, temporary=ranks, **fields)


def all_to_all_in_two_hops(ranks: int, local: int = 2, **fields) -> Plan:
    """Within nodes of `local` ranks, then between them; blocks pass through neighbours."""
    writer, nodes = Writer(ranks), ranks // local
    for rank in range(ranks):
        node, here = divmod(rank, local)
        for other in range(local):
            for far in range(nodes):
                src, dst = ("in", far * local + other), ("tmp", far * local + here)
                if other == here:
                    writer.copy(rank, src, dst)
                else:
                    writer.put(rank, node * local + other, src, dst)
            if other != here:
                writer.signal(rank, node * local + other)
        for other in range(local):
            if other != here:
                writer.wait(rank, node * local + other)
        for far in range(nodes):
            # Slots after the first N * L, as they arrive: by the node that they are from.
            src, dst = ("tmp", far * local), ("tmp", ranks + node * local)
            if far == node:
                writer.copy(rank, src, ("out", node * local), local)
            else:
                writer.put(rank, far * local + here, src, dst, local)
                writer.signal(rank, far * local + here)
        for far in range(nodes):
            if far != node:
                writer.wait(rank, far * local + here)
                writer.copy(rank, ("tmp", ranks + far * local), ("out", far * local), local)
    return writer.plan("2dh", "all_to_all", 1, temporary=2 * ranks, **fields)


ALL: tuple[Callable[..., Plan], ...] = (
    all_reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    all_to_all_in_two_hops,
)
