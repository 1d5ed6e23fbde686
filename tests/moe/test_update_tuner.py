"""UpdateTuner chooses the same strategy on all ranks, and one strategy for each range of capacities."""

import dataclasses
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fairseq_tutel as ft
from fairseq_tutel.moe import update_tuner
from fairseq_tutel.parallel.machine import CPU, Link

CONFIG = ft.MoEConfig(model_dim=8, hidden_dim=16, num_experts=2, top_k=1, capacity_factor=1.0)


def layer_of(config=CONFIG, parallel=4, local=0):
    return ft.MoELayer(config, ft.make_topology([config.num_experts], parallel, local), seed=1)


def update(tuner, layer, tokens, seconds=0.0):
    strategy = tuner.begin(tokens)
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))
    y, output = layer(x)
    (y.sum() + output.balance_loss).backward()
    time.sleep(seconds)
    tuner.end()
    return strategy


@contextmanager
def clock():
    """Replace the tuner's clock by a list whose only element is the current time."""
    now = [0.0]
    with patch.object(update_tuner, "time", SimpleNamespace(perf_counter=lambda: now[0])):
        yield now


def loop():
    """Train until the tuner has found a strategy; ranks differ in tokens and simulated times."""
    layer, rank = layer_of(local=2), dist.get_rank()
    tuner = ft.UpdateTuner([layer])
    strategies = []
    with clock() as now:
        while not tuner.tuner.best:
            # Rank 2 is the slowest rank, except with the strategy that the tuner must find.
            chosen = tuner.begin(8 + rank)
            good = chosen == ft.Strategy(adaptive_r=2, overlap=2, algorithm="2dh")
            layer(torch.randn(8 + rank, 8))[0].sum().backward()
            now[0] += 0.002 if good or rank != 2 else 0.03 - 0.005 * chosen.adaptive_r
            tuner.end()
            strategies.append(chosen)
            assert layer.strategy == chosen
    return strategies, tuner.tuner.rs, dict(tuner.tuner.best)


def test_all_ranks_choose_the_strategy_that_is_best_for_the_slowest_rank(ranks):
    got = ranks(4).run(loop)
    assert all(rank == got[0] for rank in got)
    strategies, rs, best = got[0]
    assert rs == (0, 1, 2)
    assert strategies[: update_tuner.WARM_UPDATES] == [ft.Strategy()] * update_tuner.WARM_UPDATES
    assert {strategy.overlap for strategy in strategies} >= {1, 2}
    assert {strategy.algorithm for strategy in strategies} == {"linear", "2dh"}
    (strategy,) = best.values()
    assert strategy == ft.Strategy(adaptive_r=2, overlap=2, algorithm="2dh")


def all_costs(tuner):
    return [cost for ways in tuner.tuner.costs.values() for costs in ways.values() for cost in costs]


def of_several_micro_batches():
    """Run updates of 8 micro-batches with 1 ms per token; after the first update, ranks have different
    micro-batch sizes."""
    layer = layer_of(parallel=2)
    tuner, rank = ft.UpdateTuner([layer], overlaps=(1,)), dist.get_rank()
    with clock() as now:
        for number in range(update_tuner.WARM_UPDATES + 4):
            tuner.begin(8)
            for _ in range(7):
                tuner.add_micro_batch(4 + 4 * number * rank)
                now[0] += 0.001 * (4 + 4 * number)
            now[0] += 0.008
            tuner.end()
        tuner.begin(8)
    return all_costs(tuner)


def test_the_tuner_divides_the_time_of_an_update_by_the_tokens_of_all_micro_batches(ranks):
    for costs in ranks(2).run(of_several_micro_batches):
        assert costs == pytest.approx([1000.0] * 2)


def candidates_by(machine):
    """Return the tuner's candidates for two experts with two shards each, on two nodes of two ranks."""
    tuner = ft.UpdateTuner([layer_of(local=2)], machine=machine if dist.get_rank() == 0 else None)
    tuner._warm = update_tuner.WARM_UPDATES
    tuner.begin(4096)
    (candidates,) = tuner.tuner.candidates.values()
    return candidates


def test_the_hardware_profile_of_rank_0_determines_the_candidates_of_all_ranks(ranks):
    slow = replace(CPU, inter=Link(1.0, 1e3), intra=Link(1.0, 1e3))
    by_links = ranks(4).run(candidates_by, slow)
    assert by_links == [by_links[0]] * 4
    assert by_links[0][0].overlap == 1 and max(s.overlap for s in by_links[0]) < 8
    by_experts = ranks(4).run(candidates_by, replace(CPU, flops_per_s=1.0))
    assert len(by_experts[0]) == 12 + (ft.Strategy() not in by_experts[0][:12])


def keys(factor):
    config = dataclasses.replace(CONFIG, capacity_factor=factor)
    layer = layer_of(config, parallel=2)
    tuner = ft.UpdateTuner([layer], window=4)
    for tokens in (20, 20, 20, 40):
        update(tuner, layer, tokens)
    return tuner._last[0]


def test_the_tuners_capacity_range_depends_on_the_absolute_value_of_the_capacity_factor(ranks):
    # For factor f, 40 tokens and two experts, the capacity is ceil(|f| * 40 / 2); factor 0 counts as 1.
    assert ranks(2).run(keys, 1.5)[0] == "25 to 30 slots"
    assert ranks(2).run(keys, 0.0)[0] == "20 to 24 slots"
    assert ranks(2).run(keys, -0.5)[0] == "8 to 11 slots"


def degrees_in_training(state, activations):
    """Train with an optimizer that creates its state in the first step; rank 1 has little GPU memory."""
    layer = layer_of(dataclasses.replace(CONFIG, adaptive_r=2))
    own = sum(p.numel() * 4 for p in layer.experts.expert_parameters().values())
    tuner, taken = ft.UpdateTuner([layer], overlaps=(1,)), [0.0]
    all_of_it = 2 * 2 * own * (9 if dist.get_rank() == 1 else 99)
    with patch.object(update_tuner, "_free_bytes", lambda _: all_of_it - taken[0]):
        for _ in range(update_tuner.WARM_UPDATES + 1):
            tuner.begin(8)
            taken[0] += 2 * 2 * own * activations
            tuner.end()
            taken[0] = 2 * 2 * own * state
        return tuner.tuner.rs


def test_the_tuner_measures_free_memory_at_the_peak_of_a_complete_update(ranks):
    assert ranks(4).run(degrees_in_training, 2, 2) == [(0, 1, 2)] * 4
    assert ranks(4).run(degrees_in_training, 4, 3) == [(1, 2)] * 4
    assert ranks(4).run(degrees_in_training, 3, 6) == [(2,)] * 4


def test_free_gpu_memory_includes_reserved_memory_beyond_the_peak(monkeypatch):
    numbers = {"mem_get_info": (30, 100), "memory_reserved": 50, "max_memory_allocated": 45}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    # The GPU has 30 free bytes, and this process reserves 50 bytes and used at most 45 bytes.
    assert update_tuner._free_bytes(torch.device("cuda")) == 35
