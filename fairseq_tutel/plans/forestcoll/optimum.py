"""ForestColl: how fast a network can bring everybody's shard to everybody, exactly, and by which cut.

R roots among the ranks. Every root's shard goes to all ranks; a set S of vertices that does not hold all
ranks has |S and R| shards to let out over its links, of bandwidth B+(S) together: a shard of one byte
takes at least |S and R| / B+(S). The largest of these, 1/x, is reached by trees (Edmonds 1973): with a
source that sends x to every root, x |R| can flow to every rank. All of it is whole numbers and fractions.

Source: Zhao et al., ForestColl: Throughput-Optimal Collective Communications on Heterogeneous Network
Fabrics, 2024. The search for 1/x is by Newton's method (Dinkelbach 1967) instead of theirs by halves: a
cut that is too narrow gives the next, larger, 1/x, and there are few.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fairseq_tutel.planning.network import Network
from fairseq_tutel.plans.forestcoll.max_flow import Flow, members

# A default number of trees may cost this much over the optimum.
TOLERANCE = Fraction(1, 20)
# So many numbers of trees are tried for that, before those of the optimum are taken.
TRIED = 200


@dataclass(frozen=True)
class Optimum:
    """What no schedule can be faster than.

    Attributes:
        cut: S, the vertices on the bottleneck's one side, as bits.
        narrow: |S and R| and B+(S), of which 1/x is the fraction.
    """

    cut: int
    narrow: tuple[int, int]

    @property
    def seconds(self) -> Fraction:
        """1/x, of a shard of one byte where bandwidths are bytes a second."""
        return Fraction(*self.narrow)


@dataclass(frozen=True)
class Share:
    """How links are shared out between trees.

    Attributes:
        trees: k, of every root.
        stretch: U; a link of bandwidth b is in at most U b trees, so that a shard of one byte takes U / k.
        capacities: the whole part of U b, by (source, target).
    """

    trees: int
    stretch: Fraction
    capacities: list[list[int]]

    @property
    def seconds(self) -> Fraction:
        """Of a shard of one byte where bandwidths are bytes a second."""
        return self.stretch / self.trees


def roots_of(network: Network, root: int | None) -> list[int]:
    """Return whose shards travel: one rank's, or if it is None everybody's."""
    return list(range(network.ranks)) if root is None else [root]


def optimum(network: Network, root: int | None = None) -> Optimum:
    """Return the optimum, with the cut that shows that it is one.

    Args:
        network: the links.
        root: whose shard travels; None: everybody's, as in an all-gather.
    """
    roots = roots_of(network, root)
    everything = (1 << len(network.vertices)) - 1
    best = max(
        (_narrow(network, roots, everything & ~(1 << rank)) for rank in range(network.ranks)),
        key=lambda found: found.seconds,
    )
    for rank in range(network.ranks):
        # What has passed at a smaller 1/x passes at a larger one: no rank is tried again.
        while cut := _too_narrow(network, roots, rank, best.seconds):
            best = _narrow(network, roots, cut)
    return best


def _narrow(network: Network, roots: Sequence[int], cut: int) -> Optimum:
    """Return what a set of vertices says of the optimum."""
    inside = sum(cut >> root & 1 for root in roots)
    leaving = sum(
        link.bandwidth for link in network.links if cut >> link.source & 1 > cut >> link.target & 1
    )
    return Optimum(cut, (inside, leaving))


def _too_narrow(network: Network, roots: Sequence[int], rank: int, seconds: Fraction) -> int:
    """Return a set without the rank whose links take longer for its shards, or 0."""
    source = len(network.vertices)
    # Times the numerator of 1/x all is whole.
    graph = Flow.of([[seconds.numerator * b for b in row] for row in network.matrix], 1)
    for root in roots:
        graph.add(source, root, seconds.denominator)
    _, cut = graph.push(source, rank, seconds.denominator * len(roots))
    return cut & ~(1 << source)


def optimal_share(network: Network, best: Optimum) -> Share:
    """Return the share of the fewest trees that reach the optimum."""
    widths = [link.bandwidth for link in network.links]
    common = math.gcd(best.seconds.denominator, *widths)
    return _share(network, best.seconds.denominator // common, best.seconds.numerator, common)


def _share(network: Network, trees: int, numerator: int, denominator: int) -> Share:
    capacities = [[numerator * b // denominator for b in row] for row in network.matrix]
    return Share(trees, Fraction(numerator, denominator), capacities)


def is_enough(network: Network, roots: Sequence[int], share: Share) -> bool:
    """Return whether the trees find room: whether k |R| can flow to every rank (Edmonds)."""
    graph = with_source(share.capacities, roots, share.trees)
    return reaches_all(graph, network.ranks, share.trees * len(roots))


def reaches_all(graph: Flow, ranks: int, needed: int) -> bool:
    """Return whether that much can flow from the last vertex to every rank."""
    graph, start = graph.copy(), len(graph.out) - 1
    for rank in range(ranks):
        # What flows to one rank flows on to the next: mostly few and short paths.
        if graph.push(start, rank, needed)[0] < needed:
            return False
        start = rank
    return True


def with_source(capacities: Sequence[Sequence[int]], roots: Sequence[int], trees: int) -> Flow:
    """Return the graph with one vertex more, the last, which leads to every root."""
    graph = Flow.of(capacities, 1)
    for root in roots:
        graph.add(len(capacities), root, trees)
    return graph


def fixed_share(
    network: Network, roots: Sequence[int], best: Optimum, trees: int, most: Fraction | None = None
) -> Share | None:
    """Return the share of the least U for a number of trees of every root.

    Whole parts of what a switch receives and sends are as much of both if its links are alike in both
    directions; of networks where they are not, few numbers of trees have one.

    Args:
        network: the links.
        roots: R.
        best: the optimum.
        trees: k.
        most: of U; None: any.

    Returns:
        The share; None, if there is none.
    """
    least = best.seconds * trees

    def at(stretch: Fraction) -> Share:
        return _share(network, trees, stretch.numerator, stretch.denominator)

    if most is None:
        most = least
        while not is_enough(network, roots, at(most)):
            most *= 2
    elif not is_enough(network, roots, at(most)):
        return None
    # The least U is one where a link gets one more: a whole number over its width.
    too_low = Fraction(0)
    for width in {link.bandwidth for link in network.links}:
        first = max(math.ceil(least * width), math.floor(too_low * width) + 1)
        last = math.floor(most * width)
        while first <= last:
            middle = (first + last) // 2
            stretch = Fraction(middle, width)
            if is_enough(network, roots, at(stretch)):
                most, last = stretch, middle - 1
            else:
                too_low, first = stretch, middle + 1
    found = at(most)
    return found if _is_balanced(network, found) else None


def _is_balanced(network: Network, share: Share) -> bool:
    """Return whether switches can send what they receive."""
    return all(
        sum(share.capacities[switch]) == sum(row[switch] for row in share.capacities)
        for switch in network.switches
    )


def default_share(
    network: Network, roots: Sequence[int], best: Optimum, most_trees: int | None = None
) -> Share:
    """Return the share of the fewest trees that cost at most `TOLERANCE` over the optimum.

    Args:
        network: the links.
        roots: R.
        best: the optimum.
        most_trees: k at most; where it is too few for that, the fastest share of them.
    """
    optimal = optimal_share(network, best)
    last = min(most_trees or optimal.trees, optimal.trees)
    tried = range(1, 1 + min(last, optimal.trees - 1, TRIED))
    for trees in tried:
        share = fixed_share(network, roots, best, trees, best.seconds * trees * (1 + TOLERANCE))
        if share:
            return share
    if last == optimal.trees:
        return optimal
    shares = (fixed_share(network, roots, best, trees) for trees in tried)
    return min(filter(None, shares), key=lambda share: share.seconds, default=optimal)


def names(network: Network, vertices: int) -> list[str]:
    """Return the names of a set of vertices."""
    return [network.vertices[vertex] for vertex in members(vertices)]
