"""Options: a bad value is refused by one sentence that names option, value and fix.

Covered: every check of MoEConfig, the balance-loss syntax, that no field is forgotten here, frozenness,
metadata that the flags are made from.
"""

import dataclasses

import pytest

from fairseq_tutel.config import (
    BALANCE_LOSSES,
    MoEConfig,
    options_of_scope,
    parse_balance_loss,
)

GOOD = {"model_dim": 8, "hidden_dim": 16, "num_experts": 4}

# option, bad value, what the sentence must say besides: the flag, the value, the way out.
BAD = [
    ("model_dim", 0, ("--decoder-embed-dim", "is 0", "at least 1")),
    ("hidden_dim", -3, ("--moe-expert-ffn-dim", "is -3", "at least 1")),
    ("num_experts", 0, ("--moe-expert-count", "is 0", "at least 1")),
    ("top_k", 0, ("--moe-top-k", "is 0", "from 1 to 4")),
    ("top_k", 5, ("--moe-top-k", "is 5", "4 experts", "from 1 to 4")),
    ("capacity_factor", float("inf"), ("--moe-capacity-factor", "is inf", "finite number")),
    ("capacity_factor", float("nan"), ("--moe-capacity-factor", "is nan", "finite number")),
    ("eval_capacity_factor", float("-inf"), ("--moe-eval-capacity-factor", "is -inf", "finite")),
    ("drop_policy", "luck", ("--moe-drop-policy", "'luck'", "choose one of position, bpr")),
    ("gate_type", "cosy", ("--moe-gate-type", "'cosy'", "choose one of linear, cosine")),
    ("gate_projection_dim", 0, ("--moe-gate-projection-dim", "is 0", "at least 1")),
    ("gate_temperature", 0.001, ("--moe-gate-temperature", "is 0.001", "at least 0.01")),
    ("gate_noise", -1.0, ("--moe-gate-noise", "is -1.0", "finite number")),
    ("gate_noise", float("inf"), ("--moe-gate-noise", "is inf", "finite number")),
    ("input_jitter", 1.0, ("--moe-input-jitter", "is 1.0", "from 0 to below 1")),
    ("input_dropout", -0.1, ("--moe-input-dropout", "is -0.1", "from 0 to below 1")),
    (
        "balance_loss",
        "gshard:1,gshard:2",
        ("--moe-balance-loss", "given twice", "such as gshard:1"),
    ),
    ("balance_loss", "fair:1", ("--moe-balance-loss", "'fair'", "unknown", "such as gshard:1")),
    ("balance_loss", "gshard:x", ("--moe-balance-loss", "'x'", "name:number")),
    ("balance_loss", "gshard:inf", ("--moe-balance-loss", "'inf'", "name:number")),
    ("balance_loss", "gshard:nan", ("--moe-balance-loss", "'nan'", "name:number")),
    ("expert_type", "cnn", ("--moe-expert-type", "'cnn'", "choose one of ffn, glu")),
    ("activation", "gelo", ("--activation-fn", "'gelo'", "choose one of relu, ")),
    ("activation_dropout", 1.0, ("--activation-dropout", "is 1.0", "from 0 to below 1")),
    ("activation_dropout", -0.1, ("--activation-dropout", "is -0.1", "from 0 to below 1")),
    ("init_std", -0.1, ("init_std is -0.1", "standard deviation")),
    ("init_std", float("nan"), ("init_std is nan", "standard deviation")),
    ("backend", "cuda", ("--moe-backend", "'cuda'", "choose one of auto, reference, triton")),
    ("exchange", "even", ("--moe-exchange", "'even'", "choose one of ragged, padded")),
]


@pytest.mark.parametrize("option, value, parts", BAD)
def test_a_bad_value_is_refused_by_one_sentence(option, value, parts):
    with pytest.raises(ValueError) as error:
        MoEConfig(**{**GOOD, option: value})
    message = str(error.value)
    assert message.startswith(option)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    for part in parts:
        assert part in message


def test_every_option_that_can_be_wrong_is_in_the_list():
    free = {"gate_fp32", "expert_bias", "hidden_layer_norm"}  # bool: nothing to check
    assert {field.name for field in dataclasses.fields(MoEConfig)} == free | {b[0] for b in BAD}


def test_the_defaults_are_good():
    config = MoEConfig(**GOOD)
    assert config.top_k == 2
    assert config.capacity_factor == 0.0  # nobody loses tokens without asking for it


@pytest.mark.parametrize("top_k", (1, 2, 3, 4))
def test_every_top_k_up_to_the_experts_is_good(top_k):
    assert MoEConfig(**GOOD, top_k=top_k).top_k == top_k


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoEConfig(**GOOD).top_k = 1


@pytest.mark.parametrize(
    "text, weights",
    [
        ("none", {}),
        ("", {}),
        ("gshard", {"gshard": 1.0}),
        ("gshard:0.5", {"gshard": 0.5}),
        (" gshard:1e-2 ", {"gshard": 0.01}),
        ("gshard:0", {"gshard": 0.0}),
    ],
)
def test_the_balance_loss_syntax(text, weights):
    assert parse_balance_loss(text) == weights


def test_every_named_balance_loss_exists():
    from fairseq_tutel.losses import LOSSES

    assert set(BALANCE_LOSSES) == set(LOSSES)


@pytest.mark.parametrize("scope", ("model", "system"))
def test_every_option_with_a_flag_has_its_help(scope):
    for field in options_of_scope(scope):
        assert field.metadata["flag"].startswith("--moe-"), field.name
        assert field.metadata["help"], field.name


def test_how_it_is_computed_is_kept_apart_from_what_is_computed():
    assert [field.name for field in options_of_scope("system")] == ["backend", "exchange"]
