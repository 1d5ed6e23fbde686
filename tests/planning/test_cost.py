"""The cost model: its formulas by hand, what must hold of any such model, its file and its fit.

Covered: the two all-to-alls, gathers, all-reduces, the pipeline; r's two terms; memory; candidates and
their order; machines as files; links from exact and from noisy measurements.
"""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from fairseq_tutel.planning import cost
from fairseq_tutel.planning.cost import Cluster, Work
from fairseq_tutel.planning.links import fit, fit_machine, predicted, relative_errors
from fairseq_tutel.planning.machine import CPU, PRESETS, Link, Machine, typical
from fairseq_tutel.planning.strategy import Strategy

ROUND = Machine(  # numbers that a reader can follow
    name="round",
    intra=Link(1.0, 100.0),
    inter=Link(10.0, 10.0),
    memory_bytes_per_s=1000.0,
    flops_per_s=1e6,
    gate_flops_per_s=1e5,
    memory_bytes=1e9,
    launch_s=0.5,
)
A100 = PRESETS["a100"]


def test_a_linear_all_to_all_is_bounded_by_the_slower_kind_of_link():
    # 4 nodes of 2: 80 bytes for each of 8 ranks; 1 message within the node, 6 across.
    assert cost.exchange_seconds(640, ROUND, 4, 2, "linear") == 0.5 + max(
        1 + 80 / 100, 60 + 480 / 10
    )
    one_node = cost.exchange_seconds(640, ROUND, 1, 8, "linear")
    assert one_node == 0.5 + 7 * 1 + 560 / 100
    assert cost.exchange_seconds(640, ROUND, 1, 1, "linear") == 0


def test_2dh_is_one_leg_after_the_other_and_two_gathers():
    within = 1 * 1 + 4 * 80 / 100
    across = 3 * 10 + 3 * 2 * 80 / 10
    gathers = 2 * 2 * 640 / 1000
    found = cost.exchange_seconds(640, ROUND, 4, 2, "2dh")
    assert found == pytest.approx(2 * 0.5 + within + across + gathers)


def test_a_node_s_common_link_carries_the_bytes_of_all_its_ranks():
    shared = replace(ROUND, inter_shared=True)
    assert cost.exchange_seconds(640, shared, 4, 2, "linear") == 0.5 + 60 + 2 * 480 / 10


def test_2dh_loses_on_small_clusters_and_wins_on_large_ones_with_small_messages():
    def ratio(gpus, mebibytes):
        size = mebibytes * 2**20
        linear, hierarchical = (
            cost.exchange_seconds(size, A100, gpus // 8, 8, a) for a in ("linear", "2dh")
        )
        return linear / hierarchical

    for size in (1 / 16, 1, 32, 256):
        assert ratio(16, size) < 1
        ratios = [ratio(8 * nodes, size) for nodes in (2, 8, 32, 128, 512, 2048)]
        assert all(after > before for before, after in pairwise(ratios))
        assert ratios[-1] > 1.5
    assert all(ratio(2048, small) > ratio(2048, large) for small, large in pairwise((1, 32, 256)))
    assert ratio(128, 32) < 1 < ratio(256, 32)  # what the alpha of the presets was set by
    # Messages shrink from W - L to N - 1, so no message size gains more than L.
    assert 7 < ratio(16384, 1 / 1024) < 8


@pytest.mark.parametrize(
    ("nodes", "local", "size", "expected"),
    [
        (1, 8, 2**20, "linear"),
        (64, 1, 1, "linear"),
        (2, 8, 2**25, "linear"),
        (256, 8, 2**20, "2dh"),
    ],
)
def test_the_faster_algorithm(nodes, local, size, expected):
    assert cost.faster_algorithm(None, nodes, local, size) == expected
    assert cost.faster_algorithm(A100, nodes, local, size) == expected


def test_a_machine_s_links_decide_the_faster_algorithm():
    slow_messages = replace(A100, inter=Link(1.0, 25e9))
    assert cost.faster_algorithm(A100, 2, 8, 2**28) == "linear"
    assert cost.faster_algorithm(slow_messages, 2, 8, 2**28) == "2dh"


def test_gathers_and_all_reduces_by_hand():
    # 2 nodes of 2 in a ring: 2 hops within, 1 across; each node's link brings 2 ranks' bytes, by halves.
    gathered = cost.all_gather_seconds(100, ROUND, 2, 2)
    assert gathered == 0.5 + 2 * 1 + 1 * 10 + max(300 / 100, 100 / 10)
    reduced = cost.all_reduce_seconds(400, ROUND, 2, 2)
    assert reduced == 0.5 + 2 * 1 + 2 * 10 + max(2 * 300 / 100, 2 * 400 / 2 / 2 / 10)
    assert cost.all_gather_seconds(100, ROUND, 1, 1) == cost.all_reduce_seconds(1, ROUND, 1, 1) == 0
    assert cost.all_gather_seconds(100, ROUND, 1, 2) == 0.5 + 1 + 1


def test_groups_that_share_a_node_s_link_add_up():
    shared = replace(ROUND, inter_shared=True)
    # 4 nodes of 2, one rank of each in a group; both groups' bytes cross the node's link.
    assert cost.exchange_seconds(640, shared, 4, 1, "linear", 2) == 0.5 + 30 + 2 * 480 / 10
    assert cost.all_gather_seconds(100, shared, 4, 1, 2) == 0.5 + 30 + 2 * 300 / 10
    assert cost.all_reduce_seconds(400, shared, 4, 1, 2) == 0.5 + 40 + 2 * 2 * 300 / 10
    for seconds in (cost.all_gather_seconds, cost.all_reduce_seconds):
        assert seconds(400, ROUND, 4, 1, 2) == seconds(400, ROUND, 4, 1)
        assert seconds(400, shared, 4, 2) == seconds(400, shared, 4, 2, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_replicas_of_a_node_share_its_link(size):
    # 16 nodes of 8: whether a group has one rank of a node or all 8, 8 ranks send at once.
    work = Work(tokens=8, model_dim=512, hidden_dim=4096, experts=8)
    free = replace(ROUND, launch_s=0.0, intra=Link(0.0, 1e12), inter=Link(0.0, 10.0))
    cluster = Cluster(nodes=16, local=8, expert_parallel_size=size)
    own, shared = (
        cost.step_parts(work, replace(free, inter_shared=is_shared), cluster, Strategy())
        for is_shared in (False, True)
    )
    assert shared["expert gradients"] == pytest.approx(8 * own["expert gradients"])
    # A rank's 1 / size of the layer, 15 / 16 of it there and back over 8 / size links.
    stored = 8 * work.expert_parameters / size * 2
    assert own["expert gradients"] == pytest.approx(2 * stored * 15 / 16 / (8 / size) / 10)


WORK = Work(tokens=8, model_dim=4, hidden_dim=16, experts=2, top_k=2, bytes_per_element=2)
FOUR = Cluster(nodes=2, local=2, expert_parallel_size=4)


def test_the_parts_of_a_step_by_hand():
    # s = 2, r = 2: no gather; 16 rows go to 2 ranks each, which compute with half of an expert.
    parts = cost.step_parts(WORK, ROUND, FOUR, Strategy(adaptive_r=2))
    rows, dim, hidden, parameters = 16, 4, 16, 2 * 4 * 16
    assert parts["gate"] == pytest.approx(3 * 2 * 8 * dim * 2 / 1e5)
    touched = 2 * ((rows + 2 * rows) + 4 * 2 * rows + (2 * rows + 8)) + 2 * rows
    assert parts["dispatch and combine"] == pytest.approx(touched * dim * 2 / 1000)
    counts = cost.exchange_seconds(8 * 4, ROUND, 2, 2, "linear") + 0.5
    assert parts["counts"] == counts
    trip = cost.exchange_seconds(2 * rows * dim * 2, ROUND, 2, 2, "linear")
    assert parts["exchange"] == pytest.approx(4 * trip)
    moved = (parameters / 2 + rows * (4 * dim + 2 * hidden)) * 2 / 1000
    assert parts["experts"] == pytest.approx(3 * max(2 * rows * parameters / 1e6, moved))
    assert parts["gather weights"] == parts["expert gradients"] == 0
    assert parts["dense layers"] == parts["dense gradients"] == 0


def test_gathered_weights_by_r():
    # E V / P in 4 collectives: two matrices and their biases.
    tensor_bytes = 2 * 128 / 4 * 2 / 4
    one = cost.step_parts(WORK, ROUND, FOUR, Strategy(adaptive_r=1))
    assert one["gather weights"] == 2 * 4 * cost.all_gather_seconds(tensor_bytes, ROUND, 1, 2)
    none = cost.step_parts(WORK, ROUND, FOUR, Strategy(adaptive_r=0))
    assert none["gather weights"] == 2 * 4 * cost.all_gather_seconds(tensor_bytes, ROUND, 2, 2)
    assert none["exchange"] == none["counts"] == 0
    glu = cost.step_parts(replace(WORK, glu=True), ROUND, FOUR, Strategy(adaptive_r=0))
    assert glu["gather weights"] == 2 * 6 * cost.all_gather_seconds(tensor_bytes, ROUND, 2, 2)


def test_gloo_s_reduce_scatter_takes_as_long_as_two():
    gloo = replace(ROUND, reduce_scatter_as_all_reduce=True)
    for r in (0, 1):
        own, twice = (
            cost.step_parts(WORK, machine, FOUR, Strategy(adaptive_r=r))["gather weights"]
            for machine in (ROUND, gloo)
        )
        assert twice == pytest.approx(1.5 * own)
    assert cost.step_parts(WORK, gloo, FOUR, Strategy(adaptive_r=2))["gather weights"] == 0


def test_replicas_and_dense_parameters_are_all_reduced():
    work = replace(WORK, dense_parameters=1000, layers=3)
    pair = replace(FOUR, expert_parallel_size=2)
    parts = cost.step_parts(work, ROUND, pair, Strategy())
    stored = 2 * 128 / 2 * 2
    assert parts["expert gradients"] == 3 * cost.all_reduce_seconds(stored, ROUND, 2, 1)
    assert parts["dense gradients"] == cost.all_reduce_seconds(2000, ROUND, 2, 2)
    assert parts["dense layers"] == pytest.approx(6 * 1000 * 8 / 1e6)
    one_layer = cost.step_parts(replace(work, layers=1), ROUND, pair, Strategy())
    assert parts["exchange"] == pytest.approx(3 * one_layer["exchange"])
    assert cost.step_seconds(work, ROUND, pair, Strategy()) == sum(parts.values())


def test_overlap_hides_at_most_the_shorter_of_link_and_experts():
    work = Work(tokens=16384, model_dim=4096, hidden_dim=16384, experts=64)
    cluster = Cluster(nodes=8, local=8, expert_parallel_size=64)
    parts = {d: cost.step_parts(work, A100, cluster, Strategy(overlap=d)) for d in (1, 2, 4, 8)}
    exposed = {d: of["exchange"] for d, of in parts.items()}
    assert exposed[8] < exposed[4] < exposed[2] < exposed[1]
    trip = cost.exchange_seconds(2 * 16384 * 4096 * 2, A100, 8, 8, "linear")
    assert exposed[1] == pytest.approx(4 * trip)
    longest = max(4 * trip, parts[1]["experts"])
    assert parts[8]["exchange"] + parts[8]["experts"] > longest


def test_overlap_of_tiny_work_costs_more_than_it_hides():
    work = Work(tokens=64, model_dim=256, hidden_dim=1024, experts=64)
    cluster = Cluster(nodes=8, local=8, expert_parallel_size=64)
    one, eight = (cost.step_seconds(work, A100, cluster, Strategy(overlap=d)) for d in (1, 8))
    assert eight > one


@pytest.mark.parametrize("tokens", [256, 2048, 16384])
@pytest.mark.parametrize("hidden", [1024, 16384])
@pytest.mark.parametrize("nodes", [4, 64])
def test_a_step_falls_and_then_rises_with_r(tokens, hidden, nodes):
    work = Work(tokens=tokens, model_dim=2048, hidden_dim=hidden, experts=2)
    cluster = Cluster(nodes=nodes, local=8, expert_parallel_size=8 * nodes)
    slices = cluster.slices(2)
    times = [
        cost.step_seconds(work, A100, cluster, Strategy(adaptive_r=r))
        for r in range(1, slices + 1)
        if slices % r == 0
    ]
    rising = [after > before for before, after in pairwise(times)]
    assert rising == sorted(rising), times


def test_many_tokens_want_gathered_weights_and_few_tokens_want_sliced_ones():
    cluster = Cluster(nodes=1, local=8, expert_parallel_size=8)

    def times(tokens):
        work = Work(tokens=tokens, model_dim=4096, hidden_dim=16384, experts=2)
        return [cost.step_seconds(work, A100, cluster, Strategy(adaptive_r=r)) for r in (1, 4)]

    gathered, sliced = times(65536)
    assert gathered < sliced
    gathered, sliced = times(256)
    assert sliced < gathered


def test_memory_by_hand():
    # 3 layers, P = 4, E = 2: a rank stores 64 of each layer's 256 weights.
    work = replace(WORK, layers=3, dense_parameters=1000)
    found = cost.memory_bytes(work, FOUR, Strategy(adaptive_r=1, algorithm="2dh"))
    parameters = 3 * 64 + 1000
    assert found == {
        "parameters": 2 * parameters,
        "gradients": (2 + 4) * parameters,  # fairseq keeps a copy in fp32
        "optimizer state": (8 + 4) * parameters,
        "activations": 3 * 2 * (8 * 4 + 16 * (2 * 4 + 2 * 16)),
        "row buffers": 3 * 16 * 4 * 2,
        "gathered weights": 4 * 64 * 2,
    }
    full = cost.memory_bytes(replace(work, bytes_per_element=4), FOUR, Strategy(adaptive_r=2))
    assert (full["gradients"], full["optimizer state"]) == (4 * parameters, 8 * parameters)
    assert full["gathered weights"] == 0
    everything = cost.memory_bytes(work, FOUR, Strategy(adaptive_r=0))
    assert everything["gathered weights"] == 4 * (256 - 64) * 2
    assert everything["row buffers"] == 0


def test_zero_and_offload_by_hand():
    # Eight ranks, two replicas of what P = 4 ranks store: 64 weights of each of 3 layers.
    cluster = replace(FOUR, nodes=2 * FOUR.nodes)
    work = replace(WORK, layers=3, dense_parameters=1000)
    whole, cut = 3 * 64 + 1000, 3 * 64 // 2 + 1000 // 8

    def held(stage, offload=False):
        asked = replace(work, zero_stage=stage, offload=offload)
        memory = cost.memory_bytes(asked, cluster, Strategy(adaptive_r=1))
        return memory["gradients"], memory["optimizer state"], cost.host_bytes(asked, cluster)

    assert held(0) == (6 * whole, 12 * whole, 0)
    assert held(1) == (2 * whole, 12 * cut, 0)
    assert held(2) == (2 * cut, 12 * cut, 0)
    assert held(2, offload=True) == (2 * cut, 0, 12 * cut)
    # On one rank there is nobody to share with.
    alone, one = Cluster(nodes=1, local=1, expert_parallel_size=1), Strategy()
    memories = [cost.memory_bytes(replace(work, zero_stage=stage), alone, one) for stage in (0, 2)]
    assert memories[0] == memories[1]


def test_zero_sends_gradients_there_and_weights_back():
    work, cluster = replace(WORK, dense_parameters=8000), replace(FOUR, expert_parallel_size=1)
    parts = [
        cost.step_parts(replace(work, zero_stage=stage), ROUND, cluster, Strategy())
        for stage in (0, 1)
    ]
    share = 2 * 8000 / cluster.world
    gather = cost.all_gather_seconds(share, ROUND, cluster.nodes, cluster.local)
    assert parts[1]["dense gradients"] == pytest.approx(2 * gather)
    changed = {part for part in parts[0] if parts[0][part] != parts[1][part]}
    assert changed <= {"dense gradients", "expert gradients"}


def test_candidates_cover_every_choice_once_and_are_ranked():
    work = Work(tokens=1024, model_dim=512, hidden_dim=2048, experts=4)
    found = list(cost.candidates(work, nodes=4, local=2))
    assert len(set(found)) == len(found)
    assert {cluster.expert_parallel_size for cluster, _ in found} == {1, 2, 4, 8}
    eight = [strategy for cluster, strategy in found if cluster.expert_parallel_size == 8]
    assert {strategy.adaptive_r for strategy in eight} == {0, 1, 2}
    assert {strategy.algorithm for strategy in eight} == {"linear", "2dh"}
    plans = cost.best(work, A100, nodes=4, local=2)
    assert len(plans) == len(found)
    assert all(a.seconds <= b.seconds for a, b in pairwise(plans))


def test_what_does_not_fit_comes_last():
    work = Work(tokens=65536, model_dim=1024, hidden_dim=4096, experts=2)
    plans = cost.best(work, A100, nodes=1, local=8)
    leanest = min(plan.bytes for plan in plans)
    assert plans[0].bytes > leanest
    small = cost.best(work, replace(A100, memory_bytes=leanest), nodes=1, local=8)
    assert [plan.fits for plan in small] == [plan.bytes == leanest for plan in small]
    assert small[0].fits
    assert small[0].seconds > plans[0].seconds
    assert not small[-1].fits


@pytest.mark.parametrize("size", [0, 3, 6, 16, 32])
def test_expert_groups_are_parts_of_nodes_or_whole_nodes(size):
    with pytest.raises(ValueError, match=f"expert_parallel_size is {size}, which is neither"):
        Cluster(nodes=3, local=8, expert_parallel_size=size)


def test_r_divides_the_slices():
    with pytest.raises(ValueError, match=r"adaptive_r is 3, which is neither 0 nor a divisor of"):
        cost.step_parts(WORK, ROUND, FOUR, Strategy(adaptive_r=3))
    with pytest.raises(ValueError, match="expert_parallel_size is 4 for 6 experts"):
        cost.memory_bytes(replace(WORK, experts=6), FOUR, Strategy())


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", PRESETS["a100"]),
        ("NVIDIA H100 80GB HBM3", PRESETS["h100"]),
        ("NVIDIA GH200 480GB", PRESETS["h200"]),
        ("AMD Instinct MI250X", PRESETS["mi250"]),
        ("NVIDIA RTX A1000", replace(A100, name="A100, since NVIDIA RTX A1000 is not known")),
        ("AMD Instinct MI2500", replace(A100, name="A100, since AMD Instinct MI2500 is not known")),
        (None, CPU),
    ],
)
def test_a_gpu_is_known_by_its_whole_number_or_said_not_to_be(gpu, expected):
    assert typical(gpu) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_survives_its_file(name, tmp_path):
    path = tmp_path / "machine.json"
    PRESETS[name].to_json(path)
    assert Machine.from_json(path) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"flops_per_s": 0}, "has flops_per_s 0; give a number above 0"),
        ({"memory_bytes": "80G"}, "has memory_bytes '80G'; give a number above 0"),
        ({"intra": 3}, "has intra 3; it needs alpha_s and bytes_per_s"),
        (
            {"inter": {"alpha_s": -1, "bytes_per_s": 1}},
            "has inter.alpha_s -1; give seconds, from 0",
        ),
        ({"inter": {"alpha_s": 0, "bytes_per_s": 0}}, "has inter.bytes_per_s 0; give a number"),
        (
            {"inter": {"alpha_s": True, "bytes_per_s": 1}},
            "has inter.alpha_s True; give seconds, from 0",
        ),
        ({"launch_s": "fast"}, "has launch_s 'fast'; give seconds, from 0"),
        ({"launch_s": -1e-6}, "has launch_s -1e-06; give seconds, from 0"),
        ({"launch_s": False}, "has launch_s False; give seconds, from 0"),
        ({"inter_shared": "no"}, "has inter_shared 'no'; give true or false"),
        ({"inter_shared": 1}, "has inter_shared 1; give true or false"),
        (
            {"reduce_scatter_as_all_reduce": None},
            "has reduce_scatter_as_all_reduce None; give true or false",
        ),
        ({"speed": 1}, "is no machine: speed missing or unknown; give a file of `tune"),
    ],
)
def test_a_bad_machine_is_refused_in_one_sentence(change, sentence, tmp_path):
    path = tmp_path / "machine.json"
    A100.to_json(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError) as error:
        Machine.from_json(path)
    assert str(error.value).startswith(f"{path} {sentence}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": '])
def test_what_is_no_machine_is_refused(text, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="give a file of `tune --measure --json`"):
        Machine.from_json(path)


def test_a_fit_recovers_alpha_and_beta():
    link = Link(3e-6, 2e9)
    points = [(m, b, link.seconds(m, b)) for m in (1, 7) for b in (1e3, 1e5, 1e7)]
    found = fit(points)
    assert found.alpha_s == pytest.approx(3e-6)
    assert found.bytes_per_s == pytest.approx(2e9)
    noise = random.Random(1)
    noisy = fit((m, b, s * noise.uniform(0.95, 1.05)) for m, b, s in points * 8)
    assert noisy.alpha_s == pytest.approx(3e-6, rel=0.05)
    assert noisy.bytes_per_s == pytest.approx(2e9, rel=0.05)


@pytest.mark.parametrize("points", [[], [(1, 10, 2.0), (1, 1000, 1.0)]])
def test_what_tells_no_bandwidth_is_refused(points):
    with pytest.raises(ValueError, match="do not take longer with more bytes; measure larger"):
        fit(points)


CLUSTER = Machine(
    name="emulated",
    intra=Link(3e-5, 2e9),
    inter=Link(1.2e-4, 1e8),
    memory_bytes_per_s=5e9,
    flops_per_s=1e11,
    gate_flops_per_s=1e11,
    memory_bytes=1e9,
    launch_s=2e-4,
    inter_shared=True,
)
SHAPES = [(2, 2), (4, 2), (4, 1), (2, 4), (1, 4)]


def measured(shapes, spread=0.0):
    """What benchmarks of that cluster would have measured."""
    noise = random.Random(2)
    rows = [
        {"nodes": n, "local": local, "algorithm": a, "bytes_per_rank": 2**power}
        for n, local in shapes
        for a in (("linear", "2dh") if n > 1 and local > 1 else ("linear",))
        for power in range(10, 24, 2)
    ]
    return [
        {**row, "seconds": predicted(row, CLUSTER) * noise.uniform(1 - spread, 1 + spread)}
        for row in rows
    ]


START = replace(A100, memory_bytes_per_s=CLUSTER.memory_bytes_per_s, inter_shared=True)


def test_a_machine_is_recovered_from_all_to_alls_of_many_shapes():
    found = fit_machine(measured(SHAPES), START)
    assert found.launch_s == pytest.approx(2e-4)
    for name in ("intra", "inter"):
        link, expected = getattr(found, name), getattr(CLUSTER, name)
        assert link.alpha_s == pytest.approx(expected.alpha_s)
        assert link.bytes_per_s == pytest.approx(expected.bytes_per_s)
    assert relative_errors(measured(SHAPES), found).largest < 1e-9


def test_rails_that_share_a_link_are_told_apart_from_one_alone():
    # As `tune` measures them: both rails of a node at once, besides the whole grid.
    rows = measured([(4, 2), (1, 2)])
    rail = {"nodes": 4, "local": 1, "algorithm": "linear", "on_link": 2}
    for power in range(10, 24, 2):
        row = {**rail, "bytes_per_rank": 2**power}
        row["seconds"] = cost.exchange_seconds(2**power, CLUSTER, 4, 1, "linear", 2)
        rows.append(row)
    found = fit_machine(rows, START)
    assert found.inter.bytes_per_s == pytest.approx(CLUSTER.inter.bytes_per_s)
    assert relative_errors(rows, found).largest < 1e-9


def test_a_fit_of_noisy_rows_says_how_far_it_is_off():
    rows = measured(SHAPES, spread=0.1)
    found = fit_machine(rows, START)
    errors = relative_errors(rows, found)
    assert 0.01 < errors.median < errors.p90 < errors.largest < 0.2
    assert found.inter.bytes_per_s == pytest.approx(1e8, rel=0.05)
    assert relative_errors(measured([(8, 4)]), found).largest < 0.15  # a cluster it has not seen


def test_one_shape_tells_no_launch_and_one_node_no_link_between_nodes():
    rows = measured([(1, 4)])
    found = fit_machine(rows, START)
    assert found.launch_s == 0
    assert found.intra.alpha_s == pytest.approx(3e-5 + 2e-4 / 3)
    assert found.inter == START.inter
    assert relative_errors(rows, found).largest < 1e-9


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no measured all-to-all to fit; measure one"):
        fit_machine([], START)
