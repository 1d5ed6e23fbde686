"""Flags are generated from MoEConfig and come back as the same MoEConfig; help says unit and default."""

import argparse
import dataclasses

import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from tool_in_process import tool

from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.moe.options import flag_of
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.flags import (
    EncoderDecoderOptions,
    GateLossOptions,
    ModelOptions,
    SystemOptions,
    defaults,
    expert_counts,
    layer_config,
    refuse_misspelt,
)

register()

OF_LAYER = {"model_dim": 8, "hidden_dim": 16, "activation": "relu"}


def _parse(options, words):
    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, options())
    return parser, parser.parse_args(words)


@pytest.mark.parametrize("options", [ModelOptions, EncoderDecoderOptions, SystemOptions])
def test_every_flag_has_a_help_text_with_its_default(options):
    parser, args = _parse(options, [])
    for action in parser._actions:
        if action.dest != "help":
            assert "[default: " in action.help, action.dest
    for key, value in defaults(options).items():
        assert getattr(args, key) == value
    parser.format_help()


def test_every_option_of_moe_config_is_a_flag_and_reaches_the_layer():
    values = {
        "top_k": 3,
        "capacity_factor": 1.5,
        "eval_capacity_factor": -2.0,
        "balance_loss": "none",
    }
    values |= {"expert_type": "glu", "backend": "reference", "exchange": "padded"}
    values |= {"recompute_experts": True}
    values |= {"gate_type": "cosine", "gate_projection_dim": 7, "gate_temperature": 0.25}
    values |= {"gate_noise": 1.5, "input_jitter": 0.1, "input_dropout": 0.2, "drop_policy": "rts"}
    values |= {"eval_capacity_factor": 0.0, "eval_capacity_token_fraction": 0.25, "min_capacity": 4}
    values |= {
        "capacity_multiple": 8,
        "choice": "tokens",
        "gate_index": 0,
        "score_function": "sigmoid",
    }
    values |= {"normalize_gate": "after", "routed_scaling_factor": 2.5, "prescore": True}
    values |= {"expert_groups": 2, "groups_per_token": 2, "second_expert_policy": "random"}
    values |= {"rsample": False, "sinkhorn": True, "balance_bias": False, "bias_update_rate": 0.01}
    values |= {"shared_experts": 2, "residual": True, "expert_grad_norm": "sqrt_world_size"}
    values |= {"a2a_algorithm": "2dh", "a2a_dtype": "bf16", "a2a_ffn_overlap_degree": 4}
    values |= {"parallel_type": "model", "adaptive_r": 2, "adaptive": "auto"}
    values |= {"kernel_tuning_seconds": 1.5}
    words = {"model": [], "task": []}
    options = [option for option in LAYER.values() if option.of]
    for option in options:
        value, given = values[option.name], words[option.of]
        given += [option.flag] * value if option.type is bool else [f"{option.flag}={value}"]
    _, model = _parse(ModelOptions, words["model"])
    _, system = _parse(SystemOptions, words["task"])
    config = layer_config(model, system, 4, **OF_LAYER)
    assert config == MoEConfig(num_experts=4, gate_fp32=True, **values, **OF_LAYER)
    assert {option.name for option in options} == set(values)


def test_layer_config_defaults_to_moe_config_s_own():
    _, model = _parse(ModelOptions, [])
    assert layer_config(model, None, 8, **OF_LAYER) == MoEConfig(8, 16, 8)


def test_a_configuration_saved_before_an_option_existed_still_builds_a_layer():
    values = defaults(ModelOptions)
    for option in LAYER.values():
        values.pop(option.key, None)
    assert layer_config(argparse.Namespace(**values), None, 8, **OF_LAYER) == MoEConfig(8, 16, 8)


def test_expert_counts():
    assert expert_counts("8", 3) == [8, 8, 8]
    assert expert_counts("8,8,16", 3) == [8, 8, 16]
    assert expert_counts(4, 1) == [4]


def test_no_key_is_in_two_option_sets():
    fields = [
        {f.name for f in dataclasses.fields(o)} - {"_name"} for o in (ModelOptions, SystemOptions)
    ]
    assert not fields[0] & fields[1]


def test_flags_are_found_by_a_part_of_their_name_or_help():
    text = tool("flags", "Top-K")
    assert "  --moe-top-k\n      experts per token, from 1 to" in text
    assert "of the moe_ criterions:" not in text and "--moe-freq" not in text
    assert "  --moe-top-k\n" in tool("flags", "topk") and "  --moe-top-k\n" in tool(
        "flags", "top_k"
    )
    everything = tool("flags")
    for options in (EncoderDecoderOptions, SystemOptions, GateLossOptions):
        for key in defaults(options):
            assert f"  {flag_of(key)}\n" in everything
    assert "(i + 1) % moe_freq == 0" in everything
    with pytest.raises(SystemExit, match="no flag has 'pigeon' in its name or help"):
        tool("flags", "pigeon")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("moe_topk", "moe_top_k"),
        ("moe_expert_counts", "moe_expert_count"),
        ("moe_zero_stages", "moe_zero_stage"),
    ],
)
def test_a_misspelt_override_is_refused(key, meant):
    with pytest.raises(
        ValueError, match=f"has '{key}', which is no option; did you mean '{meant}'"
    ):
        checkpoint_utils.load_checkpoint_to_cpu("nowhere.pt", {"moe_freq": 1, key: 1})


def test_overrides_of_stock_and_of_users_pass():
    refuse_misspelt({"moe_top_k": 1, "world_size": 1, "dropout": 0, "moe_of_my_own": 2})
