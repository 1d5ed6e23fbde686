"""The tests check the shape and speed of ForestColl's trees, and the plans that use the trees."""

from collections import Counter
from fractions import Fraction
from itertools import product
from random import Random

import pytest
from networks import random_network
from test_optimum import KNOWN

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.forestcoll import edge_splitting
from fairseq_tutel.plans.forestcoll import forest as forest_module
from fairseq_tutel.plans.forestcoll.forest import grow
from fairseq_tutel.plans.forestcoll.optimum import optimal_share, optimum
from fairseq_tutel.plans.generators.forest import plan_of
from fairseq_tutel.plans.network import Network, find

LONG = pytest.mark.long
# Sums move from children to parents (-1), and data moves from parents to children (1).
PHASES = {"all_gather": [1], "reduce_scatter": [-1], "all_reduce": [-1, 1]}


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    """Replay ForestColl's edge splitting, and check the capacities of the links that it replaces."""
    splits, split = [], edge_splitting._Splitting._split
    without_switches = edge_splitting.without_switches

    def recorded(self, graph, switch, piece):
        if graph is self.graph:
            splits.append((switch, *piece))
        split(self, graph, switch, piece)

    def checked(network, share):
        splits.clear()
        found = without_switches(network, share)
        left = [row[:] for row in share.capacities]
        for switch, u, t, amount in splits:
            left[u][switch] -= amount
            left[switch][t] -= amount
            left[u][t] += amount * (u != t)
            assert amount >= 0 <= min(left[u][switch], left[switch][t])
        ranks = network.ranks
        assert found == [row[:ranks] for row in left[:ranks]]
        assert not any(any(row[ranks:]) for row in left) and not any(map(any, left[ranks:]))
        return found

    monkeypatch.setattr(edge_splitting._Splitting, "_split", recorded)
    monkeypatch.setattr(forest_module, "without_switches", checked)


def assert_is_a_forest(forest):
    network, share = forest.network, forest.share
    copies, loads = Counter(), Counter()
    for tree in forest.trees:
        copies[tree.root] += tree.copies
        reached = {tree.root}
        for parent, child in tree.edges:
            assert parent in reached and child not in reached
            reached.add(child)
            loads[parent, child] += tree.copies
        assert reached == set(range(network.ranks))
    assert copies == dict.fromkeys(range(network.ranks), share.trees)
    capacities = forest_module.without_switches(network, share)
    assert all(load <= capacities[a][b] for (a, b), load in loads.items())
    assert share.seconds >= forest.best.seconds


def best_trees(network):
    return optimal_share(network, optimum(network)).trees


@pytest.mark.parametrize(
    "network",
    [pytest.param(each, marks=LONG) if each == "dgx_a100:4" else each for each in KNOWN],
    ids=lambda n: n if isinstance(n, str) else None,
)
def test_optimal_trees_reach_the_lower_bound_on_the_time_of_an_all_gather(network):
    network = network if isinstance(network, Network) else find(network)
    forest = grow(network, best_trees(network))
    assert_is_a_forest(forest)
    assert forest.share.seconds == forest.best.seconds


@pytest.mark.parametrize("name", ["dgx_a100:2", "dgx_h100:2", pytest.param("mi250:2", marks=LONG)])
def test_a_few_trees_are_nearly_as_fast_as_the_optimum(name):
    forest = grow(find(name))
    assert_is_a_forest(forest)
    assert forest.share.seconds <= Fraction(21, 20) * forest.best.seconds


@pytest.mark.parametrize(("seeds", "most"), [(range(40), 8), pytest.param(range(40, 1500), 10, marks=LONG)])
def test_the_trees_of_random_networks_are_spanning_trees_with_the_optimal_time(seeds, most):
    for seed in seeds:
        network = random_network(Random(seed), most=most)
        forest = grow(network, best_trees(network))
        assert_is_a_forest(forest)
        assert forest.share.seconds == forest.best.seconds
        assert_is_a_forest(grow(network))


def test_a_forest_may_have_ten_billion_trees_but_has_few_by_default():
    assert grow(find("dgx_a100:1"), trees=10**10).share.trees == 10**10
    assert grow(find("boxes:2x2:99991:7")).share.trees < 10


def test_the_ranks_of_a_box_send_directly_to_all_other_ranks():
    """Chains of ranks would put the same load on the links as these trees, but would be deeper."""
    depths = {name: grow(find(name)).depth for name in ("dgx_a100:1", "dgx_a100:2")}
    assert depths == {"dgx_a100:1": 1, "dgx_a100:2": 2}


@pytest.mark.parametrize("collective", PHASES)
@pytest.mark.parametrize("name", ["torus:1x4", "torus:2x3", "boxes:2x2:3:1", "boxes:1x3:1:1", None])
def test_plans_of_forests_are_correct_and_load_links_like_the_trees(collective, name):
    network = find(name) if name else random_network(Random(5), most=7)
    forest = grow(network)
    plan = plan_of(collective, forest)
    report = check(plan)
    assert plan.network == network.digest
    phases = PHASES[collective]
    # An all_gather has one more signal, by which ranks first report that they have begun the call.
    assert report.depth <= len(phases) * forest.depth + (collective == "all_gather")
    messages = Counter()
    for step, tree in product(phases, forest.trees):
        for edge in tree.edges:
            messages[edge[::step]] += tree.copies
    assert report.bytes_of_link == {pair: Fraction(n, plan.in_chunks) for pair, n in messages.items()}
    if not network.switches:
        took = max(part / network.matrix[a][b] for (a, b), part in report.bytes_of_link.items())
        shards = network.ranks if collective in ("reduce_scatter", "all_reduce") else 1
        assert took * shards == len(phases) * forest.share.seconds


@pytest.mark.parametrize("collective", PHASES)
def test_the_slices_of_a_chunk_are_sent_one_round_apart(collective):
    forest = grow(find("torus:2x4"))
    whole, cut = (check(plan_of(collective, forest, slices=slices)) for slices in (1, 3))
    assert cut.bytes_of_link == whole.bytes_of_link
    assert len(cut.loads) <= len(whole.loads) + 2 * len(PHASES[collective])

    def seconds(report):
        return report.predicted(1, 0.0, lambda link: 1.0)

    assert seconds(cut) <= 0.9 * seconds(whole)


def test_plans_of_named_networks_are_correct():
    for name in ("dgx_a100:2", "mi250:1", "cluster:2x4:40:1"):
        report = check(plan_of("all_reduce", grow(find(name))))
        assert report.depth < 25
