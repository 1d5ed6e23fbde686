"""Options: an invalid value raises a one-sentence error that names the option, the value and the fix."""

import argparse
import math

import pytest
from option_values import settings_of

from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.moe.balance import LOSSES
from fairseq_tutel.moe.config import EXCLUDED, LAYER, MoEConfig, parse_balance_loss
from fairseq_tutel.moe.gates import GATES
from fairseq_tutel.moe.slots import DROP_POLICIES
from fairseq_tutel.option import flag_of, key_of, read, refuse_bad_values
from fairseq_tutel.plugin.options import BY_OWNER, CriterionConfig, ModelConfig, SidesConfig, options_of
from fairseq_tutel.plugin.training.options import PreemptionConfig, TaskConfig

GOOD = {"model_dim": 8, "hidden_dim": 16, "num_experts": 4}

# Bad values of a layer's options, for every kind of rule.
BAD = [
    ("model_dim", 0), ("num_experts", 0), ("top_k", 0), ("top_k", 1.5), ("top_k", True), ("top_k", 5),
    ("capacity_factor", "1"), ("capacity_factor", math.nan), ("eval_capacity_factor", -math.inf),
    ("gate_noise", None), ("gate_noise", -1.0), ("gate_type", None), ("gate_type", "linear,,cosine"),
    ("prescore", "no"), ("min_capacity", 10**20), ("capacity_multiple", 0),
    ("drop_policy", "luck"), ("eom", 1.0), ("expert_groups", 3),
    ("routed_scaling_factor", 0.0), ("gate_temperature", 0.001), ("init_std", -0.1),
    ("balance_loss", {"z": 1}), ("balance_loss", "load_importance"), ("balance_loss", "gshard:1,gshard:2"),
    ("balance_loss", "fair:1"), ("expert_type", "cnn"), ("activation", "gelo"),
    ("a2a_algorithm", "ring"), ("a2a_algorithm", "plan:"), ("a2a_ffn_overlap_degree", 33),
    ("parallel_type", "adaptive"), ("parallel_type", "adaptive:-1"), ("adaptive_r", -2),
]  # fmt: skip


@pytest.mark.parametrize("option, value", BAD)
def test_an_invalid_value_raises_a_one_sentence_error(option, value):
    with pytest.raises(ValueError) as error:
        MoEConfig(**{**GOOD, option: value})
    message = str(error.value)
    assert message.startswith(option) and str(value) in message
    assert message.endswith(".") and "\n" not in message and ". " not in message


CONTRADICTIONS = [
    {"groups_per_token": 1, "expert_groups": 4, "top_k": 2},
    {"eval_capacity_token_fraction": 0.1, "eval_capacity_factor": 1.0},
    {"balance_bias": True, "rsample": True},
    {"balance_bias": True, "second_expert_policy": "sampling"},
    {"eom": 0.1, "prescore": True},
    {"cmr": True, "residual": True},
    *({"choice": "experts", **settings_of(name)[-1]} for name in EXCLUDED[0][2]),
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=str)
def test_contradicting_options_raise_a_one_sentence_error(options):
    with pytest.raises(ValueError) as error:
        MoEConfig(**{**GOOD, "top_k": 1, **options})
    message = str(error.value)
    assert any(flag_of(f"moe_{name}") in message for name in options)
    assert message.endswith(".") and "\n" not in message and ". " not in message


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


@pytest.mark.parametrize(
    "name, ours",
    [
        ("balance_loss", LOSSES),
        ("gate_type", GATES),
        ("drop_policy", DROP_POLICIES),
        ("activation", ACTIVATIONS),
    ],
)
def test_every_allowed_name_has_an_implementation(name, ours):
    with pytest.raises(ValueError) as error:
        MoEConfig(**GOOD, **{name: "luck"})
    assert ", ".join(ours) in str(error.value)
    for choice in ours:
        MoEConfig(**GOOD, **{name: choice}, gate_noise=1.0)


@pytest.mark.parametrize("owner", BY_OWNER)
def test_every_option_with_a_flag_has_help_and_a_valid_default(owner):
    for option in options_of(owner):
        assert option.help and option.theme and option.flag.startswith("--"), option.name
        assert key_of(option.flag) == option.key and flag_of(option.key) == option.flag
        assert option.same_as is None or option.same_as[0] in LAYER
    for config in (ModelConfig, SidesConfig, TaskConfig, StoreConfig, CriterionConfig):
        refuse_bad_values(config())


def test_options_of_the_execution_are_separate_from_options_of_the_result():
    themes = {"model": {"Routing", "Capacity", "Balance", "Experts"}}
    themes["task"] = {"Communication", "Parallelism", "Memory", "Kernels"}
    for option in LAYER.values():
        assert not option.of or option.theme in themes[option.of], option.name


@pytest.mark.parametrize(
    "config, option, value",
    [
        (ModelConfig, "moe_freq", -1), (ModelConfig, "moe_local_drop", 1.0),
        (SidesConfig, "encoder_moe_freq", -2), (TaskConfig, "moe_zero_stage", 3),
        (StoreConfig, "moe_expert_cache", "2 GIB"), (StoreConfig, "moe_expert_cache", "1.5"),
        (CriterionConfig, "moe_gate_loss_wt", math.inf), (CriterionConfig, "cmr_gate_loss_p", 1.1),
        (PreemptionConfig, "moe_preemption_signals", "TERM"),
    ],
)  # fmt: skip
def test_an_invalid_option_of_a_model_or_task_raises_an_error(config, option, value):
    with pytest.raises(ValueError, match=f"^{flag_of(option)} is "):
        refuse_bad_values(config(**{option: value}))


def test_missing_options_of_a_configuration_get_default_values():
    assert read(TaskConfig, None) == TaskConfig()
    read_back = read(ModelConfig, argparse.Namespace(moe_freq=1, moe_expert_count=4))
    assert read_back == ModelConfig(moe_freq=1, moe_expert_count="4")
