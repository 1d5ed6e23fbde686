"""The tests compare the cost model's predicted times and memory with values computed by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from round_machine import ROUND

from fairseq_tutel.parallel import cost
from fairseq_tutel.parallel.cost import Cluster, Work
from fairseq_tutel.parallel.links import all_reduce_seconds, exchange_seconds
from fairseq_tutel.parallel.machine import PRESETS
from fairseq_tutel.parallel.strategy import Strategy

A100 = PRESETS["a100"]


WORK = Work(tokens=8, model_dim=4, hidden_dim=16, experts=2, top_k=2, bytes_per_element=2)
FOUR = Cluster(nodes=2, local=2, expert_parallel_size=4)


def test_predicted_times_of_all_parts_of_a_step_equal_hand_computed_values():
    # With 2 shards per expert and adaptive_r 2, no weights are gathered, and 16 rows go to 2 ranks each.
    parts = cost.step_parts(WORK, ROUND, FOUR, Strategy(adaptive_r=2))
    rows, dim, hidden, parameters = 16, 4, 16, 2 * 4 * 16
    assert parts["gate"] == pytest.approx(3 * 2 * 8 * dim * 2 / 1e5)
    touched = 2 * ((rows + 2 * rows) + 4 * 2 * rows + (2 * rows + 8)) + 2 * rows
    assert parts["dispatch and combine"] == pytest.approx(touched * dim * 2 / 1000)
    counts = exchange_seconds(8 * 4, ROUND, 2, 2, "linear") + 0.5
    assert parts["counts"] == counts
    trip = exchange_seconds(2 * rows * dim * 2, ROUND, 2, 2, "linear")
    assert parts["exchange"] == pytest.approx(4 * trip)
    moved = (parameters / 2 + rows * (4 * dim + 2 * hidden)) * 2 / 1000
    assert parts["experts"] == pytest.approx(3 * max(2 * rows * parameters / 1e6, moved))
    assert parts["gather weights"] == parts["expert gradients"] == 0
    assert parts["dense layers"] == parts["dense gradients"] == 0


def test_the_cost_model_includes_all_reduces_of_replicas_and_dense_parameters():
    work = replace(WORK, dense_parameters=1000, layers=3)
    pair = replace(FOUR, expert_parallel_size=2)
    parts = cost.step_parts(work, ROUND, pair, Strategy())
    stored = 2 * 128 / 2 * 2
    assert parts["expert gradients"] == 3 * all_reduce_seconds(stored, ROUND, 2, 1)
    assert parts["dense gradients"] == all_reduce_seconds(2000, ROUND, 2, 2)
    assert parts["dense layers"] == pytest.approx(6 * 1000 * 8 / 1e6)
    one_layer = cost.step_parts(replace(work, layers=1), ROUND, pair, Strategy())
    assert parts["exchange"] == pytest.approx(3 * one_layer["exchange"])
    assert cost.step_seconds(work, ROUND, pair, Strategy()) == sum(parts.values())


def test_predicted_memory_equals_hand_computed_values():
    # With 2 experts on 4 ranks, a rank stores 64 of the 256 expert weights of each of the 3 layers.
    work = replace(WORK, layers=3, dense_parameters=1000)
    found = cost.memory_bytes(work, FOUR, Strategy(adaptive_r=1, algorithm="2dh"))
    parameters = 3 * 64 + 1000
    assert found == {
        "parameters": 2 * parameters,
        "gradients": (2 + 4) * parameters,  # Fairseq keeps an fp32 copy of gradients.
        "optimizer state": (8 + 4) * parameters,
        cost.HOST: 0,
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


def test_the_candidates_of_the_cost_model_are_distinct_and_sorted_by_time():
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
