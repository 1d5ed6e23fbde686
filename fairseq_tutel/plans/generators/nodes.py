"""Plans for n nodes of L ranks. Rank (a, i), the i-th of node a, is a * L + i."""

from fairseq_tutel.plans.format import Plan, Writer
from fairseq_tutel.plans.generators.all_pairs import gather, others, scatter


def hierarchical(collective: str, ranks: int, *, nodes: int) -> Plan:
    """all_reduce (2PH): in-node reduce_scatter, exchange of a 1/L slice across nodes, in-node all_gather.

    A rank sends 2 (L-1) messages in its node and n - 1 to other nodes, each of M / L bytes, in three
    rounds. Slice i is the sum over nodes, in order, of the sums over each node's ranks, in order.

    Source: MSCCL++ (Shah et al. 2025), section 5.
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        node = range(a * local, (a + 1) * local)
        scatter(w, r, node, i)
        # tmp[local + node] holds that node's sum of slice i.
        parts = [("in", i) if j == i else ("tmp", j) for j in range(local)]
        w.reduce(r, parts, ("tmp", local + a))
        for b in others(a, nodes):
            w.put(r, b * local + i, ("tmp", local + a), ("tmp", local + a))
            w.signal(r, b * local + i)
        for b in reversed(others(a, nodes)):
            w.wait(r, b * local + i)
        w.reduce(r, [("tmp", local + b) for b in range(nodes)], ("out", i))
        gather(w, r, node, i)
    return w.plan(f"hierarchical {collective}", collective, local, temporary=local + nodes)


def two_hops(collective: str, ranks: int, *, nodes: int) -> Plan:
    """all_to_all (2DH): within a node to the rank with the destination's local index, then across nodes.

    In its node a rank sends L - 1 messages of n chunks, (L-1)/L M bytes. To other nodes it sends n - 1
    messages of L chunks, (n-1)/n M bytes; `linear` sends (n-1) L smaller ones. Two rounds.

    Source: Tutel (Hwang et al. 2023), section 3.4.
    """
    w = Writer(ranks)
    local = ranks // nodes
    for r in range(ranks):
        a, i = divmod(r, local)
        # Chunks from (a, j) to (b, i) pass through tmp[b, j] of (a, i).
        for j in others(i, local):
            for b in range(nodes):
                w.put(r, a * local + j, ("in", b * local + j), ("tmp", b * local + i))
            w.signal(r, a * local + j)
        for b in range(nodes):
            w.copy(r, ("in", b * local + i), ("tmp", b * local + i))
        for j in reversed(others(i, local)):
            w.wait(r, a * local + j)
        # Chunks from node a arrive in tmp[ranks + a * local], in the order of sources.
        for b in others(a, nodes):
            w.put(r, b * local + i, ("tmp", b * local), ("tmp", ranks + a * local), local)
            w.signal(r, b * local + i)
        w.copy(r, ("tmp", a * local), ("out", a * local), local)
        for b in reversed(others(a, nodes)):
            w.wait(r, b * local + i)
        for first, end in ((0, a * local), ((a + 1) * local, ranks)):
            if first < end:
                w.copy(r, ("tmp", ranks + first), ("out", first), end - first)
        for j in others(i, local):
            w.flush(r, a * local + j)
    return w.plan(f"two_hops {collective}", collective, 1, temporary=2 * ranks)
