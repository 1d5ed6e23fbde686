"""Traffic: what a collective's messages load a network's links with, and so how long it takes at least.

A message takes the way over which it alone would come first. All that a collective sends counts at once,
as if it were cut so fine that every link could always work.
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from heapq import heappop, heappush

from fairseq_tutel.planning.network import Network

# By (source, target): of ranks, what one sends another; of vertices, what a link has to carry.
Load = Mapping[tuple[int, int], Fraction | int]


def busiest(network: Network, loads: Load) -> Fraction:
    """Return the most that a link has to carry, over its bandwidth: seconds, of bytes."""
    return max(Fraction(load) / network.matrix[a][b] for (a, b), load in loads.items())


def turned_rings(network: Network) -> Load:
    """Return what ranks send each other in an all-gather by as many rings as the hosts have ranks.

    A shard is cut among them. Each ring begins in every host with another rank, and leaves it by the one
    before, so that rings cross between hosts from different ranks.
    """
    total: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    hosts = list(network.hosts.values())
    rings = max(map(len, hosts))
    for turn in range(rings):
        ring = [rank for ranks in hosts for rank in ranks[turn:] + ranks[:turn]]
        for pair in zip(ring, [*ring[1:], ring[0]], strict=True):
            total[pair] += Fraction(network.ranks - 1, rings)
    return total


def routed(network: Network, messages: Load) -> Load:
    """Return what every link has to carry of messages between ranks."""
    loads: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    before = {source: ways(network, source) for source in {source for source, _ in messages}}
    for (source, target), amount in messages.items():
        vertex = target
        while vertex != source:
            loads[before[source][vertex], vertex] += amount
            vertex = before[source][vertex]
    return loads


def ways(network: Network, source: int) -> dict[int, int]:
    """Return for every vertex the one before it on the way from a source (Dijkstra)."""
    before: dict[int, int] = {}
    found = [(Fraction(0), 0, source, source)]
    while found:
        seconds, links, vertex, last = heappop(found)
        if vertex not in before:
            before[vertex] = last
            for target, bandwidth in enumerate(network.matrix[vertex]):
                if bandwidth:
                    heappush(found, (seconds + Fraction(1, bandwidth), links + 1, target, vertex))
    return before
