"""ForestColl's optimum: the least time in which each rank's shard can reach all ranks, and its cut.

A set S of vertices that lacks a rank sends the shards of its ranks R(S) over its outgoing links of total
bandwidth B+(S), so a shard of one byte takes at least |R(S)| / B+(S). Trees reach the largest of these
bounds, 1/x (Edmonds 1973): with a source that sends x to each rank, x N can flow to each rank. All numbers
are integers or fractions.

Source: Zhao et al., ForestColl: Throughput-Optimal Collective Communications on Heterogeneous Network
Fabrics, 2024. Here Newton's method (Dinkelbach 1967) replaces their bisection for 1/x: each cut that is too
narrow gives the next, larger 1/x, after few steps.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.max_flow import Flow
from fairseq_tutel.plans.network import Network

# How far the default number of trees may be from the optimum.
TOLERANCE = Fraction(1, 20)
# How many numbers of trees are tried for that, before the optimum's number is taken.
TRIED = 200


class Optimum(NamedTuple):
    """The lower bound of all schedules: S, as bits, and |R(S)| and B+(S), whose fraction is 1/x."""

    cut: int
    narrow: tuple[int, int]

    @property
    def seconds(self) -> Fraction:
        """1/x: seconds for a shard of one byte, if bandwidths are bytes a second."""
        return Fraction(*self.narrow)


class Share(NamedTuple):
    """The assignment of links to k trees per root.

    At most U b trees use a link of bandwidth b. `capacities` are U b rounded down, by source and target.
    """

    trees: int
    stretch: Fraction
    capacities: list[list[int]]

    @property
    def seconds(self) -> Fraction:
        """U / k: seconds for a shard of one byte, if bandwidths are bytes a second."""
        return self.stretch / self.trees


def optimum(network: Network) -> Optimum:
    """Return the shortest possible time of an all-gather, and the cut that limits it."""
    everything = (1 << len(network.vertices)) - 1
    best = max(
        (_narrow(network, everything & ~(1 << rank)) for rank in range(network.ranks)),
        key=lambda found: found.seconds,
    )
    for rank in range(network.ranks):
        # A rank that passes at a smaller 1/x passes at a larger one, so each rank is tried once.
        while cut := _too_narrow(network, rank, best.seconds):
            best = _narrow(network, cut)
    return best


def _narrow(network: Network, cut: int) -> Optimum:
    """Return the bound of a set of vertices."""
    inside = (cut & ((1 << network.ranks) - 1)).bit_count()
    leaving = sum(
        link.bandwidth for link in network.links if cut >> link.source & 1 > cut >> link.target & 1
    )
    return Optimum(cut, (inside, leaving))


def _too_narrow(network: Network, rank: int, seconds: Fraction) -> int:
    """Return a set without the rank whose bound is larger, or 0."""
    source = len(network.vertices)
    # Multiplied by the numerator of 1/x, all numbers are whole.
    matrix = [[seconds.numerator * b for b in row] for row in network.matrix]
    graph = with_source(matrix, network.ranks, seconds.denominator)
    _, cut = graph.push(source, rank, seconds.denominator * network.ranks)
    return cut & ~(1 << source)


def optimal_share(network: Network, best: Optimum) -> Share:
    """Return the share of the fewest trees that reach the optimum."""
    widths = [link.bandwidth for link in network.links]
    common = math.gcd(best.seconds.denominator, *widths)
    stretch = Fraction(best.seconds.numerator, common)
    return _share(network, best.seconds.denominator // common, stretch)


def _share(network: Network, trees: int, stretch: Fraction) -> Share:
    upper, lower = stretch.as_integer_ratio()
    return Share(trees, stretch, [[upper * b // lower for b in row] for row in network.matrix])


def is_enough(network: Network, share: Share) -> bool:
    """Return whether the trees fit: whether k N can flow to each rank (Edmonds)."""
    graph = with_source(share.capacities, network.ranks, share.trees)
    return reaches_all(graph, network.ranks, share.trees * network.ranks)


def reaches_all(graph: Flow, ranks: int, needed: int) -> bool:
    """Return whether `needed` can flow from the last vertex to each rank."""
    graph, start = graph.copy(), len(graph.out) - 1
    for rank in range(ranks):
        # The flow to one rank continues to the next one, mostly by few and short paths.
        if graph.push(start, rank, needed)[0] < needed:
            return False
        start = rank
    return True


def with_source(capacities: Sequence[Sequence[int]], ranks: int, trees: int) -> Flow:
    """Return the graph with a further, last vertex with edges to each rank."""
    graph = Flow.of(capacities, 1)
    for rank in range(ranks):
        graph.add(len(capacities), rank, trees)
    return graph


def fixed_share(network: Network, best: Optimum, trees: int, most: Fraction | None = None) -> Share | None:
    """Return the share with the least U, at most `most`, for `trees` trees per root; None: there is none.

    After rounding, a switch must still receive as much as it sends. This holds if its links are equal in
    both directions. In other networks few numbers of trees have a share.
    """
    least = best.seconds * trees
    if most is None:
        most = least
        while not is_enough(network, _share(network, trees, most)):
            most *= 2
    elif not is_enough(network, _share(network, trees, most)):
        return None
    # At the least U some link gets one more tree: U is a whole number over its width.
    too_low = Fraction(0)
    for width in {link.bandwidth for link in network.links}:
        first = max(math.ceil(least * width), math.floor(too_low * width) + 1)
        last = math.floor(most * width)
        while first <= last:
            middle = (first + last) // 2
            stretch = Fraction(middle, width)
            if is_enough(network, _share(network, trees, stretch)):
                most, last = stretch, middle - 1
            else:
                too_low, first = stretch, middle + 1
    found = _share(network, trees, most)
    is_balanced = all(
        sum(found.capacities[switch]) == sum(row[switch] for row in found.capacities)
        for switch in network.switches
    )
    return found if is_balanced else None


def default_share(network: Network, best: Optimum, most_trees: int | None = None) -> Share:
    """Return the share with the fewest trees that is within `TOLERANCE` of the optimum.

    With `most_trees` k is at most that, and if no such share is fast enough, the fastest one is returned.
    """
    optimal = optimal_share(network, best)
    last = min(most_trees or optimal.trees, optimal.trees)
    tried = range(1, 1 + min(last, optimal.trees - 1, TRIED))
    for trees in tried:
        share = fixed_share(network, best, trees, best.seconds * trees * (1 + TOLERANCE))
        if share:
            return share
    if last == optimal.trees:
        return optimal
    shares = (fixed_share(network, best, trees) for trees in tried)
    return min(filter(None, shares), key=lambda share: share.seconds, default=optimal)
