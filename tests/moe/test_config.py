"""Options: a bad value is refused by one sentence that names option, value and fix."""

import argparse
import dataclasses
import math
import re

import numpy as np
import pytest

from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.moe.balance import LOSSES
from fairseq_tutel.moe.balance_options import parse_balance_loss
from fairseq_tutel.moe.capacity import DROP_POLICIES
from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.moe.gates import GATES
from fairseq_tutel.option import flag_of, key_of, read, refuse_bad_values
from fairseq_tutel.plugin.options import BY_OWNER, CriterionConfig, ModelConfig, SidesConfig, options_of
from fairseq_tutel.plugin.training.options import PreemptionConfig, TaskConfig

GOOD = {"model_dim": 8, "hidden_dim": 16, "num_experts": 4}

# option, bad value, what the sentence must say besides: the flag, the value, the way out.
BAD = [
    ("model_dim", 0, ("--decoder-embed-dim", "is 0", "at least 1")),
    ("hidden_dim", -3, ("--moe-expert-ffn-dim", "is -3", "at least 1")),
    ("num_experts", 0, ("--moe-expert-count", "is 0", "at least 1")),
    ("top_k", 0, ("--moe-top-k", "is 0", "at least 1")),
    ("top_k", 1.5, ("--moe-top-k", "is 1.5", "whole number")),
    ("top_k", True, ("--moe-top-k", "is True", "whole number")),
    ("capacity_factor", "1", ("--moe-capacity-factor", "is '1'", "give a number")),
    ("gate_noise", None, ("--moe-gate-noise", "is None", "give a number")),
    ("gate_type", None, ("--moe-gate-type", "is None", "give a word")),
    ("balance_loss", {"z": 1}, ("--moe-balance-loss", "is {'z': 1}", "give a word")),
    ("prescore", "no", ("--moe-prescore", "is 'no'", "true or false")),
    ("min_capacity", 10**20, ("--moe-min-capacity", "to 1,000,000")),
    ("top_k", 5, ("--moe-top-k", "is 5", "4 experts", "from 1 to 4")),
    ("capacity_factor", 1e30, ("--moe-capacity-factor", "is 1e+30", "to 1,000,000")),
    ("capacity_factor", float("nan"), ("--moe-capacity-factor", "is nan", "finite number")),
    ("eval_capacity_factor", float("-inf"), ("--moe-eval-capacity-factor", "is -inf", "finite")),
    ("drop_policy", "luck", ("--moe-drop-policy", "'luck'", "choose one of position, bpr")),
    ("eval_capacity_token_fraction", float("nan"), ("--moe-eval-capacity-token-fraction", "finite")),
    ("min_capacity", -1, ("--moe-min-capacity", "is -1", "to 1,000,000")),
    ("capacity_multiple", 0, ("--moe-capacity-multiple", "is 0", "from 1 to")),
    ("choice", "rows", ("--moe-choice", "'rows'", "choose one of tokens, experts")),
    ("gate_type", "cosy", ("--moe-gate-type", "'cosy'", "choose one of linear, biased, cosine")),
    ("gate_type", "linear,,hash", ("--moe-gate-type", "'linear,,hash'", "package.module.Class")),
    ("gate_index", 1, ("--moe-gate-index", "is 1", "the number of gates is 1", "from 0 to 0")),
    ("gate_index", -1, ("--moe-gate-index", "is -1", "at least 0")),
    ("score_function", "relu", ("--moe-score-function", "'relu'", "softmax, sigmoid")),
    ("normalize_gate", "yes", ("--moe-normalize-gate", "'yes'", "before, after, none")),
    ("routed_scaling_factor", 0.0, ("--moe-routed-scaling-factor", "is 0.0", "above 0")),
    ("eom", 1.0, ("--moe-eom", "is 1.0", "from 0 to below 1")),
    ("fom", -0.1, ("--moe-fom", "is -0.1", "from 0 to below 1")),
    ("cmr_gate_drop", 1.5, ("--cmr-gate-drop", "is 1.5", "from 0 to below 1")),
    ("eval_sentence_length", -1, ("--moe-eval-capacity-max-seqlen", "is -1", "at least 0")),
    ("expert_groups", 3, ("--moe-expert-groups", "is 3", "4 experts", "give a divisor")),
    ("groups_per_token", 2, ("--moe-groups-per-token", "is 2, but the number of groups is 1", "at most 1")),
    ("second_expert_policy", "any", ("--moe-second-expert-policy", "'any'", "all, sampling")),
    ("balance_loss", "load_importance", ("--moe-balance-loss", "needs gate noise", "--moe-gate-noise")),
    ("bias_update_rate", -0.1, ("--moe-bias-update-rate", "is -0.1", "at least 0")),
    ("shared_experts", -1, ("--moe-shared-experts", "is -1", "at least 0")),
    ("expert_grad_norm", "W", ("--moe-normalize-expert-grad", "'W'", "world_size, sqrt_world_size")),
    ("gate_projection_dim", 0, ("--moe-gate-projection-dim", "is 0", "at least 1")),
    ("gate_temperature", 0.001, ("--moe-gate-temperature", "is 0.001", "at least 0.01")),
    ("gate_noise", -1.0, ("--moe-gate-noise", "is -1.0", "finite number")),
    ("input_jitter", 1.0, ("--moe-input-jitter", "is 1.0", "from 0 to below 1")),
    ("input_dropout", -0.1, ("--moe-input-dropout", "is -0.1", "from 0 to below 1")),
    ("balance_loss", "gshard:1,gshard:2", ("--moe-balance-loss", "given twice", "such as gshard:1")),
    ("balance_loss", "fair:1", ("--moe-balance-loss", "'fair'", "unknown", "such as gshard:1")),
    ("balance_loss", "gshard:x", ("--moe-balance-loss", "'x'", "name:number")),
    ("balance_loss", "gshard:inf", ("--moe-balance-loss", "'inf'", "name:number")),
    ("balance_loss", "gshard:-1", ("--moe-balance-loss", "'-1'", "name:number")),
    ("balance_loss", "none:1", ("--moe-balance-loss", "'none:1'")),
    ("expert_type", "cnn", ("--moe-expert-type", "'cnn'", "choose one of ffn, glu, or package")),
    ("activation", "gelo", ("--activation-fn", "'gelo'", "choose one of relu, ")),
    ("activation_dropout", 1.0, ("--activation-dropout", "is 1.0", "from 0 to below 1")),
    ("init_std", -0.1, ("init_std is -0.1", "at least 0")),
    ("backend", "cuda", ("--moe-backend", "'cuda'", "choose one of auto, reference, triton.")),
    ("fp32_products", "tf32", ("--moe-fp32-products", "is 'tf32'", "choose one of torch, tf32x3.")),
    ("exchange", "even", ("--moe-exchange", "'even'", "choose one of ragged, padded")),
    ("a2a_algorithm", "ring", ("--moe-a2a-algorithm", "'ring'", "one of linear, 2dh, auto, or plan:")),
    ("a2a_algorithm", "plan:", ("--moe-a2a-algorithm", "'plan:'", "or plan:NAME")),
    ("a2a_dtype", "int8", ("--moe-a2a-dtype", "'int8'", "choose one of same, bf16, fp8")),
    ("a2a_ffn_overlap_degree", 0, ("--moe-a2a-ffn-overlap-degree", "is 0", "from 1 to 32")),
    ("a2a_ffn_overlap_degree", 33, ("--moe-a2a-ffn-overlap-degree", "is 33", "from 1 to 32")),
    ("parallel_type", "adaptive", ("--moe-parallel-type", "'adaptive'", "data, model, auto, or adaptive")),
    ("parallel_type", "adaptive:-1", ("--moe-parallel-type", "'adaptive:-1'", "adaptive:r")),
    ("adaptive_r", -2, ("--moe-adaptive-r", "is -2", "from -1 to")),
    ("adaptive", "on", ("--moe-adaptive", "'on'", "choose one of off, auto")),
]  # fmt: skip


@pytest.mark.parametrize("option, value, parts", BAD)
def test_a_bad_value_is_refused_by_one_sentence(option, value, parts):
    with pytest.raises(ValueError) as error:
        MoEConfig(**{**GOOD, option: value})
    message = str(error.value)
    assert message.startswith((option, "--cmr"))
    assert message.endswith(".") and "\n" not in message and ". " not in message
    for part in parts:
        assert part in message


def test_numbers_of_numpy_are_taken_as_python_s():
    config = MoEConfig(
        **{**GOOD, "top_k": np.int32(2), "capacity_factor": np.float32(0.5), "gate_noise": np.int64(1)}
    )
    assert [type(v) for v in (config.top_k, config.capacity_factor)] == [int, float]
    assert (config.top_k, config.capacity_factor, config.gate_noise) == (2, 0.5, 1)


def test_every_option_that_can_be_wrong_is_in_the_list():
    # Switches have the rule of prescore.
    free = {name for name, item in LAYER.items() if item.type is bool and name != "prescore"}
    assert {field.name for field in dataclasses.fields(MoEConfig)} == free | {b[0] for b in BAD}


# What contradicts another option, and what the sentence must say.
CONTRADICTIONS = [
    ({"groups_per_token": 1, "expert_groups": 4, "top_k": 2}, ("--moe-groups-per-token", "enough")),
    ({"eval_capacity_token_fraction": 0.1, "eval_capacity_factor": 1.0},
     ("--moe-eval-capacity-token-fraction", "remove one of")),
    ({"eom": 0.1, "prescore": True}, ("--moe-eom", "is 0.1", "--moe-prescore", "remove one")),
    ({"cmr": True, "residual": True}, ("--moe-cmr", "--moe-residual", "remove one")),
    ({"choice": "experts", "drop_policy": "bpr"}, ("--moe-drop-policy", "--moe-choice experts")),
    ({"choice": "experts", "second_expert_policy": "random"}, ("--moe-second-expert-policy",)),
    ({"choice": "experts", "rsample": True}, ("--moe-rsample", "remove one")),
    ({"choice": "experts", "balance_bias": True}, ("--moe-balance-bias", "remove one")),
    ({"choice": "experts", "expert_groups": 2}, ("--moe-expert-groups", "remove one")),
    ({"choice": "experts", "gate_type": "hash"}, ("--moe-choice", "--moe-gate-type", "a hash gate")),
    ({"choice": "experts", "balance_loss": "load_importance", "gate_noise": 1.0},
     ("--moe-balance-loss", "--moe-choice experts", "z or none")),
    ({"choice": "experts", "sinkhorn": True}, ("--moe-sinkhorn", "remove one")),
    ({"gate_type": "linear,hash", "balance_bias": True}, ("--moe-balance-bias", "a hash gate chooses")),
    ({"gate_type": "hash", "expert_groups": 2}, ("--moe-expert-groups", "a hash gate chooses")),
    ({"sinkhorn": True, "rsample": True}, ("--moe-sinkhorn", "--moe-rsample", "remove one")),
    ({"balance_bias": True, "rsample": True}, ("--moe-balance-bias", "--moe-rsample")),
    ({"balance_bias": True, "second_expert_policy": "sampling"}, ("--moe-balance-bias", "sampling")),
    ({"gate_type": "hash", "score_function": "sigmoid"}, ("--moe-score-function", "hash")),
    ({"gate_type": "hash", "input_jitter": 0.1}, ("--moe-input-jitter", "is 0.1", "hash")),
    ({"gate_type": "hash", "input_dropout": 0.1}, ("--moe-input-dropout", "hash")),
    ({"gate_type": "hash", "second_expert_policy": "random"}, ("--moe-second-expert-policy", "hash")),
    ({"gate_type": "linear,hash", "gate_noise": 1.0}, ("--moe-gate-noise", "hash", "remove one")),
]  # fmt: skip


@pytest.mark.parametrize("options, parts", CONTRADICTIONS, ids=str)
def test_contradicting_options_are_refused_by_one_sentence(options, parts):
    with pytest.raises(ValueError) as error:
        MoEConfig(**{**GOOD, "top_k": 1, **options})
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    for part in parts:
        assert part in message


def test_the_defaults_are_good():
    config = MoEConfig(**GOOD)
    assert config.top_k == 2
    assert config.capacity_factor == 0.0  # nobody loses tokens without asking for it


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


@pytest.mark.parametrize(
    "name, ours",
    [
        ("balance_loss", LOSSES),
        ("gate_type", GATES),
        ("drop_policy", DROP_POLICIES),
        ("activation", ACTIVATIONS),
    ],
)
def test_the_names_that_may_be_chosen_are_those_there_is_something_for(name, ours):
    with pytest.raises(ValueError) as error:
        MoEConfig(**GOOD, **{name: "luck"})
    assert ", ".join(ours) in str(error.value)
    for choice in ours:
        MoEConfig(**GOOD, **{name: choice}, gate_noise=0.0 if choice == "hash" else 1.0)


@pytest.mark.parametrize("owner", BY_OWNER)
def test_every_option_with_a_flag_has_its_help_and_a_default_that_is_good(owner):
    for option in options_of(owner):
        assert option.help and option.theme and option.flag.startswith("--"), option.name
        assert key_of(option.flag) == option.key and flag_of(option.key) == option.flag
        assert option.same_as is None or option.same_as[0] in LAYER
    for config in (ModelConfig, SidesConfig, TaskConfig, StoreConfig, CriterionConfig):
        refuse_bad_values(config())


def test_how_it_is_computed_is_kept_apart_from_what_is_computed():
    themes = {"model": {"Routing", "Capacity", "Balance", "Experts"}}
    themes["task"] = {"Communication", "Parallelism", "Memory", "Kernels"}
    for option in LAYER.values():
        assert not option.of or option.theme in themes[option.of], option.name


@pytest.mark.parametrize(
    "config, option, value, sentence",
    [
        (ModelConfig, "moe_freq", -1, "--moe-freq is -1; give a whole number of layers, at least 0."),
        (ModelConfig, "moe_expert_ffn_dim", -1, "--moe-expert-ffn-dim is -1; give the experts' hidden "),
        (ModelConfig, "moe_pregate", -1, "--moe-pregate is -1; give a whole number of MoE layers, "),
        (SidesConfig, "encoder_moe_freq", -2, "--encoder-moe-freq is -2; give a whole number of layers"),
        (TaskConfig, "moe_local_size", -1, "--moe-local-size is -1; give the ranks per node, or 0 "),
        (TaskConfig, "moe_adaptive_window", 0, "--moe-adaptive-window is 0; give a whole number of slots"),
        (StoreConfig, "moe_expert_store", "all", "--moe-expert-store is 'all'; choose one of resident"),
        (StoreConfig, "moe_expert_tier", "tape", "--moe-expert-tier is 'tape'; choose one of auto, host"),
        (StoreConfig, "moe_expert_cache", "2 GIB", "--moe-expert-cache is '2 GIB'; give a number of"),
        (StoreConfig, "moe_expert_cache", "1.5", "--moe-expert-cache is '1.5'; give a number of"),
        (StoreConfig, "moe_expert_cache_policy", "x", "--moe-expert-cache-policy is 'x'; choose one"),
        (TaskConfig, "moe_zero_stage", 3, "--moe-zero-stage is 3; give 0 (nothing is partitioned)"),
        (TaskConfig, "moe_checkpoint", "half", "--moe-checkpoint is 'half'; choose one of full, sharded."),
        (ModelConfig, "moe_local_drop", 1.0, "--moe-local-drop is 1.0; give a number from 0 to below 1."),
        (SidesConfig, "moe_pregate_sides", "all", "--moe-pregate-sides is 'all'; choose one of both, "),
        (CriterionConfig, "cmr_gate_loss_p", 1.1, "--cmr-gate-loss-p is 1.1; give a number from 0 to 1."),
        (CriterionConfig, "cmr_gate_loss_wt", -1.0, "--cmr-gate-loss-wt is -1.0; give a finite number"),
        (CriterionConfig, "moe_gate_loss_wt", math.inf, "--moe-gate-loss-wt is inf; give a finite number"),
        (PreemptionConfig, "moe_preemption_seconds", 0.0, "--moe-preemption-seconds is 0.0; give a"),
        (PreemptionConfig, "moe_preemption_signals", "TERM", "is 'TERM'; give names of signals (SIGTERM,"),
    ],
)  # fmt: skip
def test_a_bad_value_around_the_layers_is_refused_by_one_sentence(config, option, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        refuse_bad_values(config(**{option: value}))


def test_a_signal_that_is_given_twice_is_one():
    assert PreemptionConfig(moe_preemption_signals="SIGINT, SIGINT").names == ("SIGINT",)


def test_a_configuration_is_read_with_defaults_for_what_it_lacks():
    assert read(TaskConfig, None) == TaskConfig()
    read_back = read(ModelConfig, argparse.Namespace(moe_freq=1, moe_expert_count=4))
    assert read_back == ModelConfig(moe_freq=1, moe_expert_count="4")
