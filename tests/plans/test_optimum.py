"""The tests compare ForestColl's optimum with known values and with all vertex sets of small networks."""

from fractions import Fraction
from random import Random

import pytest
from networks import network_of, random_network, widest_cut

from fairseq_tutel.plans.forestcoll.optimum import (
    TOLERANCE,
    default_share,
    fixed_share,
    is_enough,
    optimal_share,
    optimum,
)
from fairseq_tutel.plans.network import Network, find

UNEVEN_LINE = network_of(3, [(0, 1, 1), (1, 0, 1), (1, 2, 2), (2, 1, 2)])
# Each of two switches has two GPUs, and a third switch connects the two switches.
TREE_OF_SWITCHES = network_of(
    4,
    [link for a, b in ((0, 4), (1, 4), (2, 5), (3, 5), (4, 6), (5, 6)) for link in ((a, b, 1), (b, a, 1))],
)
# The values are the optimal time for shards of size 1, and the trees per rank that reach this time.
KNOWN = {
    UNEVEN_LINE: (2, 1),
    TREE_OF_SWITCHES: (3, 1),
    "torus:1x4": ("3/2", 2),
    "torus:1x8": ("7/2", 2),
    "torus:4x4": ("15/4", 4),
    "boxes:1x4:1:1": (3, 1),
    "boxes:2x4:10:1": (1, 1),
    "boxes:2x2:3:1": (1, 1),
    "dgx_a100:1": ("7/300", 1),
    "dgx_a100:2": ("3/65", 13),
    "dgx_a100:4": ("3/25", 1),
    "mi250:1": ("7/150", 3),
    "mi250:2": ("15/166", 83),
}


@pytest.mark.parametrize("network", KNOWN, ids=lambda n: n if isinstance(n, str) else None)
def test_the_optimum_of_each_known_network_is_the_expected_value(network):
    seconds, trees = KNOWN[network]
    network = network if isinstance(network, Network) else find(network)
    best = optimum(network)
    share = optimal_share(network, best)
    assert (best.seconds, share.trees) == (Fraction(seconds), trees)
    assert share.seconds == best.seconds == Fraction(*best.narrow)
    assert is_enough(network, share)


def check_every_cut(seed):
    network = random_network(Random(seed))
    best = optimum(network)
    assert best.seconds == widest_cut(network), seed
    assert is_enough(network, optimal_share(network, best))
    # `narrow` has the number of ranks in the vertex set `cut`, and the bandwidth that leaves the set.
    inside = {vertex for vertex in range(len(network.vertices)) if best.cut >> vertex & 1}
    assert not inside.issuperset(range(network.ranks))
    leaving = sum(x.bandwidth for x in network.links if x.source in inside and x.target not in inside)
    assert best.narrow == (len(inside.intersection(range(network.ranks))), leaving)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2000), marks=pytest.mark.long)])
def test_small_networks_have_no_vertex_set_with_a_larger_lower_bound(seeds):
    for seed in seeds:
        check_every_cut(seed)


def test_the_time_with_a_fixed_number_of_trees_is_the_shortest_possible():
    """With a slightly smaller `stretch`, the link capacities must not be enough for the trees."""
    for seed in range(12):
        network = random_network(Random(seed), most=7)
        best = optimum(network)
        for trees in (1, 2, 3):
            share = fixed_share(network, best, trees)
            assert share.seconds >= best.seconds and is_enough(network, share)
            assert share.capacities == [[int(share.stretch * b) for b in row] for row in network.matrix]
            less = share.stretch - Fraction(1, 10**6)
            fewer = [[int(less * b) for b in row] for row in network.matrix]
            assert not is_enough(network, type(share)(trees, less, fewer))


@pytest.mark.parametrize(
    ("name", "trees", "seconds"),
    [
        # With one tree, the bandwidths (the denominators) are 1.1 %, 22 % and 9.6 % below the optimum.
        ("dgx_a100:2", 1, "16/342.857143"),
        ("mi250:1", 1, "16/266.666667"),
        ("mi250:2", 1, "32/320"),
    ],
)
def test_the_time_with_a_fixed_number_of_trees_has_the_known_value(name, trees, seconds):
    network = find(name)
    share = fixed_share(network, optimum(network), trees)
    ranks, bandwidth = seconds.split("/")
    assert float(share.seconds) == pytest.approx(int(ranks) / float(bandwidth), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "trees"), [("dgx_a100:2", 1), ("mi250:1", 3), ("mi250:2", 2), ("torus:1x8", 2)]
)
def test_the_default_is_the_fewest_trees_within_5_percent_of_the_optimum(name, trees):
    network = find(name)
    best = optimum(network)
    share = default_share(network, best)
    assert share.trees == trees and share.seconds <= best.seconds * (1 + TOLERANCE)
    for fewer in range(1, trees):
        slower = fixed_share(network, best, fewer)
        assert slower.seconds > best.seconds * (1 + TOLERANCE)
