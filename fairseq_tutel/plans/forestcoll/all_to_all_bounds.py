"""All-to-all bounds: the least time of a network for one byte from each rank to each other rank.

A set S of vertices sends |S and ranks| times |ranks not in S| bytes over its outgoing links. That is a
lower bound, which may not be reachable. A linear program over all paths gives the exact time (maximum
concurrent flow; Shahrokhi and Matula 1990), with one flow per rank in place of one per pair.
"""

from collections.abc import Sequence
from fractions import Fraction

from fairseq_tutel.planning.network import Network

# Networks of at most this many vertices have all cuts tried, in about a second; others cuts of whole hosts.
MOST = 20
# The most variables of the linear program, one for each rank and link; more take minutes.
VARIABLES = 20_000


def cut_bound(network: Network) -> tuple[Fraction, int, bool]:
    """Return the largest bound of a cut.

    Returns:
        Seconds, if bandwidths are bytes a second; the vertices on one side, as bits; and whether all cuts
        were tried. Otherwise these were cuts of single ranks, hosts and groups of adjacent hosts.
    """
    vertices = range(len(network.vertices))
    if len(vertices) <= MOST:
        return *_best_union(network, [[vertex] for vertex in vertices]), True
    parts = _with_switches(network)
    alone = [[rank] for rank in range(network.ranks)] + parts
    together = -(-len(parts) // MOST)
    groups = [
        [vertex for part in parts[first : first + together] for vertex in part]
        for first in range(0, len(parts), together)
    ]
    return *max(_best_union(network, groups), *(_bound(network, part) for part in alone)), False


def _bound(network: Network, part: Sequence[int]) -> tuple[Fraction, int]:
    """Return the bound of a set of vertices, and the set as bits."""
    inside = set(part)
    shards = sum(vertex < network.ranks for vertex in inside)
    leaving = sum(
        width
        for vertex in inside
        for target, width in enumerate(network.matrix[vertex])
        if target not in inside
    )
    pairs = shards * (network.ranks - shards)
    return Fraction(pairs, max(leaving, 1)), sum(1 << vertex for vertex in inside)


def _with_switches(network: Network) -> list[list[int]]:
    """Return hosts with the switches that only they use, and the other switches."""
    hosts = [list(ranks) for ranks in network.hosts.values()]
    shared = []
    for switch in network.switches:
        near = {x.source for x in network.links if x.target == switch}
        own = [host for host in hosts if near <= {*host, switch}]
        if own:
            own[0].append(switch)
        else:
            shared.append([switch])
    return hosts + shared


def _best_union(network: Network, parts: Sequence[Sequence[int]]) -> tuple[Fraction, int]:
    """Return the largest bound of a union of parts that lacks the last part."""
    ranks = network.ranks
    owner = {vertex: index for index, part in enumerate(parts) for vertex in part}
    between = [dict.fromkeys(range(len(parts)), 0) for _ in parts]
    for link in network.links:
        a, b = owner[link.source], owner[link.target]
        if a != b:
            between[a][b] += link.bandwidth
            # Both directions are counted, and each set receives as much as it sends: half of it leaves.
            between[b][a] += link.bandwidth
    near = [[(b, width) for b, width in row.items() if width] for row in between]
    weight = [sum(vertex < ranks for vertex in part) for part in parts]
    inside = [False] * len(parts)
    shards, twice_leaving = 0, 0
    most, least, best = 0, 1, 0
    # Gray code adds or removes one part at a time.
    for code in range(1, 2 ** (len(parts) - 1)):
        part = (code & -code).bit_length() - 1
        sign = -1 if inside[part] else 1
        inside[part] = not inside[part]
        shards += sign * weight[part]
        for other, width in near[part]:
            twice_leaving += -sign * width if inside[other] else sign * width
        pairs = 2 * shards * (ranks - shards)
        if pairs * least > most * twice_leaving:
            most, least, best = pairs, twice_leaving, code ^ code >> 1
    members = sum(1 << vertex for index, part in enumerate(parts) if best >> index & 1 for vertex in part)
    return Fraction(most, least), members


def linear_program(network: Network) -> float:
    """Return the seconds of the best routing, as `cut_bound`; needs scipy.

    Raises:
        ValueError: it has too many variables.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    ranks, vertices, links = network.ranks, len(network.vertices), network.links
    # Variables: each rank's flow over each link, rank by rank, and the seconds.
    count = ranks * len(links) + 1
    if count > VARIABLES:
        raise ValueError(
            f"The linear program of {ranks} GPUs and {len(links)} links would take minutes; it is skipped."
        )
    stays, wanted = [], []
    for rank in range(ranks):
        for index, link in enumerate(links):
            column = rank * len(links) + index
            stays += [(rank * vertices + link.target, column, 1)]
            stays += [(rank * vertices + link.source, column, -1)]
        wanted += [(vertex < ranks) - (vertex == rank) * ranks for vertex in range(vertices)]
    fits = [(index, rank * len(links) + index, 1) for rank in range(ranks) for index in range(len(links))]
    fits += [(index, count - 1, -link.bandwidth) for index, link in enumerate(links)]

    def matrix(entries: list[tuple[int, int, int]], rows: int) -> coo_array:
        row, column, value = zip(*entries, strict=True)
        return coo_array((value, (row, column)), shape=(rows, count)).tocsr()

    found = linprog(
        [0] * (count - 1) + [1],
        A_ub=matrix(fits, len(links)),
        b_ub=[0] * len(links),
        A_eq=matrix(stays, ranks * vertices),
        b_eq=wanted,
        method="highs",
    )
    assert found.success, found.message
    return float(found.fun)
