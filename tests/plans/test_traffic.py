"""Traffic of rings, recursive doubling and all-to-alls over networks, against the lower bounds."""

from fractions import Fraction

import pytest
from test_optimum import ONE_WAY_RING

from fairseq_tutel.planning.network import Network, find
from fairseq_tutel.planning.traffic import busiest, routed, turned_rings
from fairseq_tutel.plans.forestcoll.all_to_all_bounds import cut_bound, linear_program
from fairseq_tutel.plans.forestcoll.forest import grow
from fairseq_tutel.plans.generators import make


def takes(network, name, collective, nodes=1):
    plan = make(name, collective, network.ranks, nodes=nodes)
    return busiest(network, routed(network, plan.bytes_sent))


@pytest.mark.parametrize(
    ("name", "ring", "rings", "doubling"),
    [
        ("star:4", 1, 1, 1),
        # Both directions of the ring are used, and 1 + 2 + 4 shards times one, two and four links.
        ("ring:8", 2, 2, Fraction(40, 7)),
        # 15 shards through one adapter, or through eight: 15 / 25 and 15 / (8 * 25), of 3 / 65.
        ("dgx_a100:2", 13, Fraction(13, 8), Fraction(104, 15)),
    ],
)
def test_no_other_schedule_is_faster(name, ring, rings, doubling):
    network = find(name)
    best = grow(network).best.seconds
    found = (
        takes(network, "ring", "all_gather") / best,
        busiest(network, routed(network, turned_rings(network))) / best,
        takes(network, "recursive_doubling", "all_gather") / best,
    )
    assert found == (ring, rings, doubling)


@pytest.mark.parametrize("name", ["mesh:2x4", "torus:4x4", "hypercube:3", "mi250:1", "boxes:2x4:10:1"])
def test_the_default_forest_is_at_least_as_fast_as_rings(name):
    network = find(name)
    forest = grow(network).seconds
    for load in (make("ring", "all_gather", network.ranks).bytes_sent, turned_rings(network)):
        assert forest <= busiest(network, routed(network, load))


def test_messages_in_a_box_stay_in_it_where_that_is_faster():
    network = find("mi250:2")
    loads = routed(network, {(7, 8): 1})
    # Over three links of 100, 50 and 50 GB/s or more instead of two of 16.
    assert len(loads) > 2 and all(vertex < 16 for link in loads for vertex in link)


# Seconds for one byte between each pair of ranks.
ALL_TO_ALL = {
    "ring:4": 2, "ring:8": 8, "full:8": 1, "hypercube:3": 4, "star:4": 3, "mesh:2x4": 8, "torus:4x4": 8,
    "boxes:2x4:10:1": 4, "boxes:2x2:3:1": 2, "dgx_a100:1": "7/300", "dgx_a100:2": "8/25",
    "mi250:1": "16/75",
}  # fmt: skip


@pytest.mark.parametrize("network", [*ALL_TO_ALL, ONE_WAY_RING], ids=str)
def test_known_bounds_of_all_to_alls(network):
    pytest.importorskip("scipy")
    bound = exact = Fraction(ALL_TO_ALL.get(network, 4))
    if isinstance(network, Network):
        exact = 6  # the cut's bound is 4
    else:
        network = find(network)
    found, cut, is_all = cut_bound(network)
    assert (found, is_all) == (bound, True)
    assert linear_program(network) == pytest.approx(float(exact), rel=1e-7)
    inside = sum(cut >> rank & 1 for rank in range(network.ranks))
    leaving = sum(x.bandwidth for x in network.links if cut >> x.source & 1 and not cut >> x.target & 1)
    assert found == Fraction(inside * (network.ranks - inside), leaving)
    assert takes(network, "linear", "all_to_all") * network.ranks >= exact


def test_cuts_of_large_networks_are_those_of_hosts_and_ranks():
    for name, bound in (
        ("mi250:2", 1),
        ("dgx_a100:4", Fraction(24, 25)),
        ("star:64", 63),
        ("boxes:32x2:3:1", 62),
    ):
        found, _, is_all = cut_bound(find(name))
        assert (found, is_all) == (bound, False), name
    pytest.importorskip("scipy")
    with pytest.raises(ValueError, match="32 GPUs and 992 links would take minutes"):
        linear_program(find("full:32"))
