"""Traffic: the load of a network's links by a collective, and so a lower bound of its time.

A message takes its fastest route. All messages count at once, as if they were cut so fine that every link
is always busy.
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from heapq import heappop, heappush

from fairseq_tutel.planning.network import Network

# Amounts by (source, target): of ranks, what one sends another; of vertices, the load of a link.
Load = Mapping[tuple[int, int], Fraction | int]


def busiest(network: Network, loads: Load) -> Fraction:
    """Return the largest load of a link over its bandwidth: seconds, if loads are bytes."""
    return max(Fraction(load) / network.matrix[a][b] for (a, b), load in loads.items())


def turned_rings(network: Network) -> Load:
    """Return what ranks send each other in an all-gather by as many rings as a host has ranks.

    Each ring carries a part of a shard, and enters and leaves each host at other ranks.
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
    """Return the load of every link by messages between ranks."""
    loads: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    before = {source: ways(network, source) for source in {source for source, _ in messages}}
    for (source, target), amount in messages.items():
        vertex = target
        while vertex != source:
            loads[before[source][vertex], vertex] += amount
            vertex = before[source][vertex]
    return loads


def ways(network: Network, source: int) -> dict[int, int]:
    """Return for every vertex its predecessor on the fastest route from a source (Dijkstra)."""
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
