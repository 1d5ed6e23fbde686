"""The tests check the balance bias: its update rule, the micro-batches that it counts, and its dtype."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.balance import BalanceBias, update_biases
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=4, balance_bias=True)


def build(**options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=1)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, CONFIG.model_dim, generator=generator)


@settings(max_examples=100, deadline=None)
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=6), rate=st.floats(0, 1))
def test_an_experts_bias_rises_if_its_load_is_below_the_mean_and_falls_if_it_is_above(loads, rate):
    bias = BalanceBias(len(loads), rate)
    bias.bias += torch.arange(len(loads))
    bias.load += 5
    bias.update(torch.tensor(loads))
    mean = sum(loads) / len(loads)
    for e, load in enumerate(loads):
        step = rate if load < mean else -rate if load > mean else 0.0
        assert float(bias.bias[e]) == pytest.approx(e + step, abs=1e-6)  # fp32
    assert not bias.load.any()


def test_the_load_in_training_counts_assignments_of_real_tokens_before_dropping():
    layer = build(capacity_factor=0.5)
    mask = torch.arange(20) % 3 == 1
    load = torch.zeros(4, dtype=torch.int64)
    for seed in (1, 2):
        routing = layer(tokens(20, seed=seed), mask)[1].routing
        assert int(routing.dropped_K.sum()) > 0
        load += routing.expert_ids_TK[~mask].flatten().bincount(minlength=4)
        assert torch.equal(layer.balance_bias.load, load)
    layer.eval()(tokens(20))
    assert torch.equal(layer.balance_bias.load, load)
    update_biases(layer)
    steps = (load.sum() / 4 - load).sign() * 0.001
    torch.testing.assert_close(layer.balance_bias.bias, steps)
    assert not layer.balance_bias.load.any()


def test_the_balance_bias_of_a_frozen_gate_stays_the_same():
    layer = build()
    layer.gate.requires_grad_(False)
    layer(tokens(20))
    update_biases(layer)
    assert not layer.balance_bias.bias.any()


def test_the_state_dict_contains_the_balance_bias_but_not_the_loads():
    layer, other = build(), build()
    layer.balance_bias.bias.uniform_(-1, 1)
    layer(tokens(20))
    state = layer.state_dict()
    assert [name for name in state if "balance" in name] == ["balance_bias.bias"]
    other.load_state_dict(state)
    assert torch.equal(other.balance_bias.bias, layer.balance_bias.bias)
    assert not other.balance_bias.load.any()


@pytest.mark.parametrize("cast", ("half", "bfloat16", "double"))
def test_casting_a_model_to_another_dtype_keeps_the_balance_bias_in_fp32(cast):
    layer = build(gate_fp32=False)
    layer.balance_bias.bias.fill_(1.0)
    getattr(layer, cast)()
    layer.to(getattr(torch, "float64" if cast == "double" else "bfloat16"))
    bias = layer.balance_bias
    assert bias.bias.dtype == torch.float32 and bias.load.dtype == torch.int64
    for _ in range(3):  # bf16 cannot represent the number 1.003.
        bias.update(torch.tensor([0, 0, 0, 4]))
    torch.testing.assert_close(bias.bias, torch.tensor([1.003, 1.003, 1.003, 0.997]))
    bias.bias.copy_(torch.tensor([0.0, 0.0, 3.0, 0.0]))
    x = tokens(6).to(layer.gate.weight.dtype)
    assert (layer(x)[1].routing.expert_ids_TK[:, 0] == 2).all()
    assert layer.state_dict()["balance_bias.bias"].dtype == torch.float32


@pytest.mark.parametrize("reentrant", (False, True))
def test_the_load_counts_a_recomputed_micro_batch_once(reentrant):
    name = "decoder.layers.0.fc1"
    layer, reference = (MoEFeedForward(CONFIG, Topology(), 1, name), MoELayer(CONFIG, seed=1, name=name))
    expected = torch.zeros(4, dtype=torch.int64)
    for seed in (1, 2):
        calls = []
        layer.begin_micro_batch()

        def forward(x: Tensor, calls=calls) -> Tensor:
            calls.append(1)
            return layer(x)

        x = tokens(3, 4, seed=seed).requires_grad_()
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
        assert len(calls) == 2
        expected += reference(x, time_first=True)[1].routing.assigned_KE.sum(dim=0)
        assert int(expected.sum()) == seed * 3 * 4 * 2
        assert torch.equal(layer.balance_bias.load, expected)
