"""For every parallelism degree r, the adaptive layer returns the outputs of a layer on one rank."""

import dataclasses
import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from normal import normal

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint.experts import drop_everywhere, gather_everywhere, gather_experts
from fairseq_tutel.kernels import reference
from fairseq_tutel.moe.adaptive import allowed_degrees
from fairseq_tutel.parallel.strategy import Strategy

TOKENS = (9, 0, 7, 1, 12, 3, 5, 8)
FFN = MoEConfig(model_dim=8, hidden_dim=16, num_experts=2, activation="gelu", capacity_factor=1.0)
KINDS = {
    "ffn": FFN,
    "glu": dataclasses.replace(FFN, expert_type="glu"),
    "no bias": dataclasses.replace(FFN, expert_bias=False, capacity_factor=0.0),
    "relu, padded": dataclasses.replace(FFN, activation="relu", exchange="padded"),
}


def tokens_of(rank, step=0):
    return normal(TOKENS[rank], FFN.model_dim, seed=10 * rank + step).requires_grad_()


def run(layer, x):
    y, output = layer(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    ((y * weights).sum() + output.balance_loss).backward()
    return y.detach()


def layers(config, parallel, local=0):
    """Return a layer with expert shards and an equal layer with complete experts on this rank."""
    place = make_topology([config.num_experts], parallel, local)
    return [MoELayer(config, where, seed=3).double() for where in (place, None)]


def same(got, expected, what):
    torch.testing.assert_close(
        got, expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"rank {dist.get_rank()}, {what}: {m}"
    )


def compare(config, parallel, local, strategies):
    """Run the sharded layer with each strategy, and compare it with the layer that has complete experts."""
    sliced, whole = layers(config, parallel, local)
    rank = dist.get_rank()
    for step, strategy in enumerate(strategies):
        sliced.follow(strategy)
        x, x_whole = tokens_of(rank, step), tokens_of(rank, step)
        same(run(sliced, x), run(whole, x_whole), f"output of {strategy}")
        same(x.grad, x_whole.grad, f"gradient of x of {strategy}")
        same(sliced.gate.weight.grad, whole.gate.weight.grad, f"gradient of the gate of {strategy}")
        local_experts = sliced.experts
        mine = slice(local_experts.first, local_experts.first + local_experts.num_local)
        for name, parameter in whole.experts.expert_parameters().items():
            total = parameter.grad.clone()
            dist.all_reduce(total, group=sliced.topology.expert_group)
            got = local_experts.expert_parameters()[name].grad
            same(got, local_experts.own_part(name, total[mine]), f"gradient of {name} of {strategy}")
        for layer in (sliced, whole):
            layer.zero_grad()


def strategies_of(slices, grid):
    """Return strategies with overlap degrees 1 and 3 for every parallelism degree r."""
    other = "2dh" if grid else "linear"
    ways = (((1, "linear"), (3, other)), ((1, other), (3, "linear")))
    return [
        Strategy(adaptive_r=r, overlap=d, algorithm=a)
        for i, r in enumerate(allowed_degrees(slices))
        for d, a in ways[i % 2]
    ]


@pytest.mark.parametrize(
    "world, experts, parallel, kind",
    [
        *itertools.product((2,), (1,), (2,), KINDS),
        *itertools.product((4,), (2,), (4,), ("no bias", "relu, padded")),
        *itertools.product((4,), (1, 4), (2,), ("glu", "relu, padded")),
        (2, 2, 2, "ffn"),
        (4, 1, 4, "ffn"),
        pytest.param(8, 2, 8, "glu", marks=pytest.mark.long),
        pytest.param(8, 1, 8, "relu, padded", marks=pytest.mark.long),
    ],
)
def test_the_adaptive_layer_equals_a_layer_on_one_rank_for_every_r(ranks, world, experts, parallel, kind):
    config = dataclasses.replace(KINDS[kind], num_experts=experts, top_k=min(2, experts))
    local = 2 if parallel > 2 else 0
    strategies = strategies_of(max(1, parallel // experts), local)
    assert {strategy.adaptive_r for strategy in strategies} >= {0, 1}
    ranks(world).run(compare, config, parallel, local, strategies)


def rows_computed(config, parallel, degrees):
    """Return, for each degree r, the number of rows that this rank computes and the shape of fc1."""
    layer, _ = layers(config, parallel)
    seen = []

    def forward(x, index, weights, *args, **more):
        num_rows = len(x) if index is None else len(index)
        seen[-1].append((num_rows, weights.fc1_weight.shape[:2]))
        return original(x, index, weights, *args, **more)

    original = reference.ffn_forward
    with patch.object(reference, "ffn_forward", forward):
        for degree in degrees:
            seen.append([])
            layer.follow(Strategy(adaptive_r=degree))
            run(layer, tokens_of(dist.get_rank()))
    return [calls[0] for calls in seen]


def test_each_row_is_sent_to_r_ranks_that_compute_one_shard_of_the_hidden_dimension_each(ranks):
    config = dataclasses.replace(FFN, num_experts=1, top_k=1, capacity_factor=0.0)
    degrees = (1, 0, 4, 2)  # One layer uses these parallelism degrees r in this order.
    of_ranks = ranks(4).run(rows_computed, config, 4, degrees)
    for degree, *got in zip(degrees, *of_ranks, strict=True):
        rows = [n for n, _ in got]
        if degree == 0:
            assert rows == list(TOKENS[:4])
        else:
            assert sum(rows) == degree * sum(TOKENS[:4])
            # Each of the 4 ranks divides its rows over the others with a difference of at most 1.
            assert max(rows) - min(rows) <= 4
        assert {tuple(shape) for _, shape in got} == {(1, 16 // max(1, degree))}


def gathered(parallel):
    sliced, whole = layers(FFN, parallel)
    gather_experts(sliced, sliced.topology)
    if dist.get_rank() == 0:
        state = sliced.state_dict()
        assert state.keys() == whole.state_dict().keys()
        for name, tensor in whole.state_dict().items():
            assert torch.equal(state[name], tensor), name
    # A layer with expert shards loads a state dict with complete experts.
    twice = {name: 2 * tensor for name, tensor in whole.state_dict().items()}
    sliced.load_state_dict(twice)
    whole.load_state_dict(twice)
    x = tokens_of(dist.get_rank())
    same(sliced(x)[0], whole(x)[0], "output after load")
    gather_everywhere(sliced, sliced.topology)
    same(sliced(x)[0], whole(x)[0], "output with experts everywhere")
    drop_everywhere(sliced)


@pytest.mark.parametrize("parallel", (2, 4))
def test_expert_shards_are_saved_and_loaded_as_complete_experts(ranks, parallel):
    ranks(4).run(gathered, parallel)


def refused(config, parallel):
    try:
        MoELayer(config, make_topology([config.num_experts], parallel))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"hidden_dim": 15}, "hidden_dim (--moe-expert-ffn-dim) is 15, but"),
        ({"adaptive_r": 3, "num_experts": 1, "top_k": 1}, "adaptive_r (--moe-adaptive-r) is 3, but"),
        ({"parallel_type": "model", "hidden_layer_norm": True}, "(--moe-parallel-type) is model, which"),
        ({"expert_type": "torch.nn.Identity"}, "cannot be split; give a size of at most 2"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_sharded_raise_a_one_sentence_error(ranks, change, sentence):
    for message in ranks(4).run(refused, dataclasses.replace(FFN, **change), 4):
        assert sentence in message and message.endswith("."), message
