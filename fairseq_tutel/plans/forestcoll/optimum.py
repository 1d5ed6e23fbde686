"""Finds ForestColl's optimum, which is the least time to send each rank's shard to all ranks.

Let S be a set of vertices that does not have all ranks. The shards of the ranks R(S) in S leave S over
links with the total bandwidth B+(S). Sending shards of one byte therefore takes at least |R(S)| / B+(S).
Let 1/x be the largest of these lower bounds. There are trees whose time is 1/x (Edmonds 1973). If an extra
source has a link of bandwidth x to each of the N ranks, a flow of x N is possible from the source to each
rank; for a smaller 1/x, it is not. All numbers in this module are integers or fractions.

The bound is from Zhao et al., ForestColl (2024). The paper finds 1/x by bisection. This module uses
Newton's method (Dinkelbach 1967). A set S with a larger bound than the current 1/x gives the next 1/x.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.max_flow import Flow
from fairseq_tutel.plans.network import Network

# With the default number of trees, the time is at most this fraction above the optimum.
TOLERANCE = Fraction(1, 20)
# At most this many tree counts k are tried. After that, the optimum's tree count is used.
TRIED = 200


class Optimum(NamedTuple):
    """The lower bound (1/x) for the time of any all-gather, and a set S of vertices that gives this bound.

    `cut` is the set S as bits. `narrow` is the pair |R(S)| and B+(S), whose quotient is 1/x.
    """

    cut: int
    narrow: tuple[int, int]

    @property
    def seconds(self) -> Fraction:
        """The seconds (1/x) to send shards of one byte, if bandwidths are in bytes per second."""
        return Fraction(*self.narrow)


class Share(NamedTuple):
    """The number of trees that may use each link of a network, if each root has k = `trees` trees.

    At most U b trees use a link of bandwidth b, where U is `stretch`. `capacities` has U b, rounded down.
    """

    trees: int
    stretch: Fraction
    capacities: list[list[int]]

    @property
    def seconds(self) -> Fraction:
        """The seconds (U / k) to send shards of one byte, if bandwidths are in bytes per second."""
        return self.stretch / self.trees


def optimum(network: Network) -> Optimum:
    """Return the least possible time of an all-gather on a network, and a set S that limits this time."""
    everything = (1 << len(network.vertices)) - 1
    best = max(
        (_narrow(network, everything & ~(1 << rank)) for rank in range(network.ranks)),
        key=lambda found: found.seconds,
    )
    for rank in range(network.ranks):
        # The bound 1/x only grows, so the ranks that were tried before need no second try.
        while cut := _too_narrow(network, rank, best.seconds):
            best = _narrow(network, cut)
    return best


def _narrow(network: Network, cut: int) -> Optimum:
    """Return the lower bound for the all-gather time that a set of vertices (`cut`, as bits) gives."""
    inside = (cut & ((1 << network.ranks) - 1)).bit_count()
    leaving = sum(
        link.bandwidth for link in network.links if cut >> link.source & 1 > cut >> link.target & 1
    )
    return Optimum(cut, (inside, leaving))


def _too_narrow(network: Network, rank: int, seconds: Fraction) -> int:
    """Return a set of vertices without `rank` whose bound is above `seconds`, or 0 if there is none."""
    source = len(network.vertices)
    # All capacities are multiplied by the numerator of 1/x, so that they are integers.
    matrix = [[seconds.numerator * b for b in row] for row in network.matrix]
    graph = with_source(matrix, network.ranks, seconds.denominator)
    _, cut = graph.push(source, rank, seconds.denominator * network.ranks)
    return cut & ~(1 << source)


def optimal_share(network: Network, best: Optimum) -> Share:
    """Return the assignment of links to trees that reaches the optimal time with the fewest trees."""
    widths = [link.bandwidth for link in network.links]
    common = math.gcd(best.seconds.denominator, *widths)
    stretch = Fraction(best.seconds.numerator, common)
    return _share(network, best.seconds.denominator // common, stretch)


def _share(network: Network, trees: int, stretch: Fraction) -> Share:
    upper, lower = stretch.as_integer_ratio()
    return Share(trees, stretch, [[upper * b // lower for b in row] for row in network.matrix])


def is_enough(network: Network, share: Share) -> bool:
    """Return whether the capacities of a share are large enough for its trees."""
    graph = with_source(share.capacities, network.ranks, share.trees)
    return reaches_all(graph, network.ranks, share.trees * network.ranks)


def reaches_all(graph: Flow, ranks: int, needed: int) -> bool:
    """Return whether a flow of `needed` from the graph's last vertex to each rank is possible."""
    graph, start = graph.copy(), len(graph.out) - 1
    for rank in range(ranks):
        # Extending the flow to the next rank usually needs only a few short paths.
        if graph.push(start, rank, needed)[0] < needed:
            return False
        start = rank
    return True


def with_source(capacities: Sequence[Sequence[int]], ranks: int, trees: int) -> Flow:
    """Return a graph whose last vertex is a source with edges of capacity `trees` to all ranks."""
    graph = Flow.of(capacities, 1)
    for rank in range(ranks):
        graph.add(len(capacities), rank, trees)
    return graph


def fixed_share(network: Network, best: Optimum, trees: int) -> Share:
    """Return the fastest assignment of links to `trees` trees per root, which has the least U."""
    least = most = best.seconds * trees
    while not is_enough(network, _share(network, trees, most)):
        most *= 2
    # At the least U, U b is an integer for the bandwidth b of some link, so only such U are tried.
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
    return _share(network, trees, most)


def default_share(network: Network, best: Optimum) -> Share:
    """Return the assignment of links to the fewest trees with a time within `TOLERANCE` of the optimum."""
    optimal = optimal_share(network, best)
    for trees in range(1, min(optimal.trees, TRIED + 1)):
        if is_enough(network, _share(network, trees, best.seconds * trees * (1 + TOLERANCE))):
            return fixed_share(network, best, trees)
    return optimal
