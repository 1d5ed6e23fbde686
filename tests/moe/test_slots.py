"""The tests compare capacity rules with plain arithmetic."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.slots import Capacity, capacity_of

CONFIG = MoEConfig(model_dim=4, hidden_dim=3, num_experts=4, top_k=2)


def by_hand(rule: Capacity, top_k: int, num_experts: int, num_tokens: int) -> int:
    if rule.token_fraction > 0:
        limit = math.ceil((rule.tokens or num_tokens) * rule.token_fraction)
    else:
        limit = top_k * math.ceil(num_tokens * abs(rule.factor) / num_experts)
    return math.ceil(max(limit, rule.minimum) / rule.multiple) * rule.multiple


rules = st.builds(
    Capacity,
    factor=st.floats(-4, 4).filter(bool) | st.sampled_from([0.5, 1.0, 1.25, -1.0, 1e-9]),
    token_fraction=st.just(0.0) | st.floats(0.001, 1.5),
    tokens=st.just(0) | st.integers(1, 5000),
    minimum=st.integers(0, 40),
    multiple=st.integers(1, 9),
)


@settings(max_examples=400, deadline=None)
@given(
    rule=rules, top_k=st.integers(1, 8), num_experts=st.integers(1, 64), num_tokens=st.integers(0, 5000)
)  # fmt: skip
def test_the_capacity_equals_plain_arithmetic_and_most_slots_is_an_upper_bound(
    rule, top_k, num_experts, num_tokens
):
    slots = int(rule.slots(top_k, num_experts, torch.tensor(num_tokens)))
    assert slots == by_hand(rule, top_k, num_experts, num_tokens)
    assert rule.is_limited
    for at_most in (num_tokens, num_tokens + 1, 2 * num_tokens):
        assert rule.most_slots(top_k, num_experts, at_most) >= slots


@pytest.mark.parametrize(
    "options, training, factor, fraction",
    [
        ({"capacity_factor": 1.5}, True, 1.5, 0.0),
        ({"capacity_factor": 1.5}, False, 0.0, 0.0),
        ({"capacity_factor": -1.5, "eval_capacity_factor": 2.0}, False, 2.0, 0.0),
        ({"capacity_factor": 1.5, "eval_capacity_factor": 2.0}, True, 1.5, 0.0),
        ({"capacity_factor": 1.5, "eval_capacity_token_fraction": 0.25}, False, 0.0, 0.25),
        ({"capacity_factor": 1.5, "eval_capacity_token_fraction": 0.25}, True, 1.5, 0.0),
        ({"capacity_factor": 1.5, "eval_capacity_token_fraction": -1.0}, False, 1.5, 0.0),
        # Without an evaluation capacity, experts choose as many tokens in evaluation as in training.
        ({"capacity_factor": 1.5, "choice": "experts"}, False, 1.5, 0.0),
        ({"capacity_factor": 1.5, "choice": "experts", "eval_capacity_factor": 2.0}, False, 2.0, 0.0),
        ({"eval_capacity_token_fraction": -1.0}, False, 0.0, 0.0),
    ],
    ids=str,
)
def test_training_and_evaluation_have_different_capacity_rules(options, training, factor, fraction):
    config = dataclasses.replace(CONFIG, min_capacity=3, capacity_multiple=4, **options)
    rule = capacity_of(config, training)
    assert rule == Capacity(factor=factor, token_fraction=fraction, minimum=3, multiple=4)
    for call in (0.0, 0.5, -2.0):  # A factor given to forward replaces the configured factor and fraction.
        expected = Capacity(factor=call, minimum=3, multiple=4)
        assert capacity_of(config, training, call) == expected


def test_the_capacity_factor_of_one_forward_call_does_not_affect_other_calls():
    layer = MoELayer(CONFIG, seed=1)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    for factor, limit in ((0.25, 6), (-0.25, 6), (0.0, math.inf), (None, math.inf), (1.0, 20)):
        for training in (True, False):
            given = None if factor is None else np.float32(factor)
            routing = layer.train(training)(x, capacity_factor=given)[1].routing
            assert int(routing.counts_E.max()) <= limit
            dropped = int(routing.dropped_K.sum())
            assert dropped == 80 - int(routing.counts_E.sum())
            assert dropped > 0 if limit == 6 else limit == 20 or dropped == 0
