"""Makes networks of ranks, switches and links for tests of collective plans."""

from fractions import Fraction
from itertools import combinations

from fairseq_tutel.plans.network import Link, Network, checked


def network_of(ranks, links, hosts=1):
    """Return a network of links (source, target, bandwidth); vertices from `ranks` on are switches."""
    size = 1 + max(max(source, target) for source, target, _ in links)
    local = ranks // hosts
    return checked(
        Network(
            name="made up",
            places=tuple(divmod(rank, local) for rank in range(ranks)),
            vertices=tuple(f"v{vertex}" for vertex in range(size)),
            links=tuple(Link(*link) for link in links),
        )
    )


def random_network(random, most=10):
    """Return a random network, a sum of cycles in both directions; the first cycle has all vertices."""
    size = random.randint(3, most)
    ranks = random.randint(2, size)
    widths = {}
    for cycle in range(random.randint(1, 4)):
        members = random.sample(range(size), size if cycle == 0 else random.randint(2, size))
        width = random.randint(1, 5)
        for source, target in zip(members, [*members[1:], members[0]], strict=True):
            for pair in ((source, target), (target, source)):
                widths[pair] = widths.get(pair, 0) + width
    return network_of(ranks, [(*pair, width) for pair, width in widths.items()])


def widest_cut(network):
    """Try all vertex sets; return the largest ratio of ranks in a set to bandwidth that leaves the set."""
    ranks, size = range(network.ranks), len(network.vertices)
    best = Fraction(0)
    for number in range(1, size):
        for inside in map(set, combinations(range(size), number)):
            shards = len(inside.intersection(ranks))
            if 0 < shards < len(ranks):
                leaving = sum(
                    x.bandwidth for x in network.links if x.source in inside and x.target not in inside
                )
                best = max(best, Fraction(shards, leaving))
    return best
