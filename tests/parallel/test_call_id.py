"""Ranks that are in different layer calls raise a clear error, with every strategy."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fairseq_tutel import MoEConfig, MoELayer, Strategy, make_topology
from fairseq_tutel.parallel.guard import CommunicationError

CONFIG = MoEConfig(model_dim=4, hidden_dim=4, num_experts=4, top_k=1)

# Each entry has the number of experts, the EP size, the ranks per node, exchange options, and a strategy.
PATHS = {
    "linear": (4, 4, 0, {}, Strategy()),
    "replicas": (4, 2, 0, {}, Strategy()),
    "two hops": (4, 4, 2, {}, Strategy(algorithm="2dh")),
    "padded": (4, 4, 0, {"exchange": "padded"}, Strategy()),
    "gathered": (4, 4, 0, {}, Strategy(adaptive_r=0)),
    "slices, r = s": (2, 4, 0, {}, Strategy(adaptive_r=2)),
    "chunks": (4, 4, 0, {}, Strategy(overlap=3)),
}


def two_layers(experts, parallel, local, options, strategy):
    place = make_topology(experts, parallel, local)
    configs = [dataclasses.replace(CONFIG, num_experts=n, **options) for n in experts]
    layers = [MoELayer(c, place, seed=i, name=f"layers.{i}") for i, c in enumerate(configs)]
    for layer in layers:
        layer.follow(strategy)
    return layers


def call(layer, tokens=3):
    try:
        return layer(torch.ones(tokens, CONFIG.model_dim))[0]
    except CommunicationError as error:
        return str(error)


def in_different_layers(experts, *path):
    layers = two_layers(experts, *path)
    odd = dist.get_rank() % 2
    before = [call(layer).shape for layer in layers]
    assert before == [(3, CONFIG.model_dim)] * 2
    return call(layers[odd], tokens=3 * (1 - odd))


@pytest.mark.parametrize("name", PATHS)
def test_ranks_that_call_different_layers_raise_an_error(ranks, name):
    count, *path = PATHS[name]
    message = ranks(4).run(in_different_layers, [count, count], *path)
    group = "rank {} in {}; rank {} in {}" if name == "replicas" else "ranks 0, 2 in {}; ranks 1, 3 in {}"
    for rank, sentence in enumerate(message):
        assert sentence.startswith(f"rank {rank} could not finish the "), sentence
        calls = [f"call 2 of layers.{i}, for training" for i in range(2)]
        if name == "replicas":
            first = rank - rank % 2
            calls = [first, calls[0], first + 1, calls[1]]
        assert f"because ranks are in different calls ({group.format(*calls)});" in sentence


@pytest.mark.parametrize("name", ("linear", "gathered"))
def test_ranks_that_call_layers_of_different_sizes_raise_an_error(ranks, name):
    _, *path = PATHS[name]
    for sentence in ranks(4).run(in_different_layers, [4, 8], *path):
        assert "ranks 0, 2 in call 2 of layers.0" in sentence


def one_evaluates_within_a_training(count, *path):
    layer, other = two_layers([count, count], *path)
    if dist.get_rank() == 0:
        layer.eval()
    message = [call(layer)]
    # The higher count on rank 1 simulates a call that only rank 1 made.
    other.calls.count += dist.get_rank()
    return [*message, call(other)]


@pytest.mark.parametrize("name", ("padded", "gathered"))
def test_ranks_with_different_modes_or_call_counts_raise_an_error(ranks, name):
    for mode, late in ranks(2).run(one_evaluates_within_a_training, 4, 2, 0, *PATHS[name][3:]):
        assert (
            "(rank 0 in call 1 of layers.0, for evaluation; rank 1 in call 1 of layers.0, for "
            "training);" in mode
        )
        assert "(rank 0 in call 1 of layers.1, for training; rank 1 in call 2 of layers.1" in late
