"""The tuner in a training: one choice for all ranks, buckets by the sign rule, its file.

Covered: ranks with different times and tokens; a user's own loop, with slices and without; keys for
positive, negative and no capacity factor; an update that does not end; the dictionary, kept, read, of
another model, torn, in a folder that cannot be; an r that takes too much memory; nothing to choose.
"""

import dataclasses
import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fairseq_tutel as ft
from fairseq_tutel import update_tuner
from fairseq_tutel.comm.topology import Topology

CONFIG = ft.MoEConfig(model_dim=8, hidden_dim=16, num_experts=2, top_k=1, capacity_factor=1.0)


def layer_of(config=CONFIG, parallel=4, local=0):
    return ft.MoELayer(config, ft.make_topology([config.num_experts], parallel, local), seed=1)


def update(tuner, layer, tokens, seconds=0.0):
    how = tuner.begin(tokens)
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))
    y, output = layer(x)
    (y.sum() + output.balance_loss).backward()
    time.sleep(seconds)
    tuner.end()
    return how


def loop(path):
    """Train until the bucket is settled; ranks differ in tokens and in how long they pretend to take."""
    layer, rank = layer_of(local=2), dist.get_rank()
    tuner = ft.UpdateTuner([layer], path=path)
    hows, now = [], [0.0]
    original, update_tuner.time = update_tuner.time, SimpleNamespace(perf_counter=lambda: now[0])
    try:
        while not tuner.tuner.best:
            # Rank 2 is the slowest, but for the one way that is to be found.
            chosen = tuner.begin(8 + rank)
            good = chosen == ft.How(adaptive_r=2, overlap=2, algorithm="2dh")
            layer(torch.randn(8 + rank, 8))[0].sum().backward()
            now[0] += 0.002 if good or rank != 2 else 0.03 - 0.005 * chosen.adaptive_r
            tuner.end()
            hows.append(chosen)
            assert layer.how == chosen
    finally:
        update_tuner.time = original
    return hows, tuner.tuner.rs, dict(tuner.tuner.best)


def test_ranks_take_one_choice_and_find_what_is_best_for_the_slowest(ranks, tmp_path):
    got = ranks(4).run(loop, str(tmp_path / "tuned.json"))
    assert all(rank == got[0] for rank in got)
    hows, rs, best = got[0]
    assert rs == (0, 1, 2)
    assert {how.overlap for how in hows} == {1, 2, 4, 8}
    assert {how.algorithm for how in hows} == {"linear", "2dh"}
    (how,) = best.values()
    assert how == ft.How(adaptive_r=2, overlap=2, algorithm="2dh")
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert content["signature"]["ranks"] == 4 and len(content["buckets"]) == 1


def costs_of_an_update():
    layer = layer_of(parallel=2)
    tuner = ft.UpdateTuner([layer])
    for _ in range(3):
        update(tuner, layer, 8, seconds=0.05 * dist.get_rank())
    return [
        cost for ways in tuner.tuner.costs.values() for costs in ways.values() for cost in costs
    ]


def test_an_update_costs_what_the_slowest_rank_takes_by_the_clock(ranks):
    first, second = ranks(2).run(costs_of_an_update)
    assert first == second != []
    assert all(cost >= 1000 * 50 / 8 for cost in first)


def reread(path, change):
    config = dataclasses.replace(CONFIG, **change)
    layer = layer_of(config, local=2)
    tuner = ft.UpdateTuner([layer], path=path)
    update(tuner, layer, 8)
    return len(tuner.tuner.best)


def test_a_dictionary_holds_for_the_same_model_alone(ranks, tmp_path):
    path = tmp_path / "tuned.json"
    ranks(4).run(loop, str(path))
    content = json.loads(path.read_text())
    assert ranks(4).run(reread, str(path), {}) == [1] * 4
    assert ranks(4).run(reread, str(path), {"hidden_dim": 32}) == [0] * 4
    path.write_text('{"format": 1')
    assert ranks(4).run(reread, str(path), {}) == [0] * 4
    content["buckets"] = [3]
    path.write_text(json.dumps(content))
    assert ranks(4).run(reread, str(path), {}) == [0] * 4


def unwritable():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    update_tuner.logger.addHandler(handler)
    layer = layer_of(parallel=2)
    tuner = ft.UpdateTuner([layer], path="/proc/none/tuned.json", overlaps=(1,))
    while not tuner.tuner.best:
        update(tuner, layer, 8)
    update_tuner.logger.removeHandler(handler)
    return [line for line in records if "was not written" in line]


def test_a_file_that_cannot_be_written_costs_the_file_alone(ranks):
    first, second = ranks(2).run(unwritable)
    assert len(first) == 1 and second == []


def keys(factor):
    config = dataclasses.replace(CONFIG, capacity_factor=factor)
    layer = layer_of(config, parallel=2)
    tuner = ft.UpdateTuner([layer], window=4)
    torch.nn.init.zeros_(layer.gate.weight)  # all tokens go to expert 0
    for tokens in (20, 20, 40):
        update(tuner, layer, tokens)
    return [tuner._last[0], layer.busiest is None or int(layer.busiest)]


def test_buckets_go_by_the_sign_rule(ranks):
    # 40 tokens on two experts: 1 * ceil(f * 40 / 2); without a factor what the last update's load says.
    assert ranks(2).run(keys, 1.5)[0] == ["capacity factor 1.5, 28 to 31 places", True]
    assert ranks(2).run(keys, 0.0)[0] == ["capacity factor 0, 40 to 43 places", 40]
    assert ranks(2).run(keys, -0.5)[0] == ["capacity factor -0.5, 8 to 11 places", 40]


def without_an_end():
    layer = layer_of(parallel=2)
    tuner = ft.UpdateTuner([layer], overlaps=(1,))
    for _ in range(2):
        update(tuner, layer, 8)
    measured = sum(len(c) for costs in tuner.tuner.costs.values() for c in costs.values())
    for _ in range(5):
        tuner.begin(8)
    update(tuner, layer, 8)
    again = sum(len(c) for costs in tuner.tuner.costs.values() for c in costs.values())
    return measured, again


def test_an_update_that_does_not_end_does_not_count(ranks):
    for before, after in ranks(2).run(without_an_end):
        assert after - before <= 1


def degrees(free, given):
    layer = layer_of(dataclasses.replace(CONFIG, adaptive_r=given))
    own = sum(p.numel() * 4 for p in layer.experts.expert_parameters().values())
    original, update_tuner._free_bytes = update_tuner._free_bytes, lambda _: 2 * 2 * own * free
    try:
        return ft.UpdateTuner([layer]).tuner.rs
    finally:
        update_tuner._free_bytes = original


def test_an_r_that_takes_too_much_memory_is_not_tried_but_for_the_one_given(ranks):
    # Two slices of two experts on four ranks: r = 1 holds 2 times, r = 0 4 times a rank's own.
    assert ranks(4).run(degrees, 4, 2)[0] == (0, 1, 2)
    assert ranks(4).run(degrees, 3, 2)[0] == (1, 2)
    assert ranks(4).run(degrees, 1, 2)[0] == (2,)
    assert ranks(4).run(degrees, 1, 0)[0] == (0, 2)


def tutel():
    experts = {"type": "ffn", "hidden_size_per_expert": 8, "num_experts_per_device": -2}
    layer = ft.moe_layer({"type": "top"}, 8, experts, seeds=(1, 2, None), parallel_type="auto")
    tuner = ft.UpdateTuner([layer.moe])
    tuner.begin(4)
    return tuner.tuner.rs, tuner.tuner.overlaps


def test_a_tutel_layer_is_tuned_too(ranks):
    assert ranks(4).run(tutel) == [((0, 1, 2), (1, 2, 4, 8))] * 4


def test_wrong_use_is_refused_in_a_sentence():
    for wrong in ([], ft.MoELayer(CONFIG)):
        with pytest.raises(ValueError, match="takes a list of at least one MoELayer"):
            ft.UpdateTuner(wrong)


def test_nothing_to_choose_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="every rank has all experts; give layers whose topology"):
        ft.UpdateTuner([ft.MoELayer(CONFIG, Topology())])
