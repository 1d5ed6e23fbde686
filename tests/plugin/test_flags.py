"""Flags are made from MoEConfig and parsed to the same MoEConfig; help has unit and default."""

import argparse

import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from option_values import settings_of
from tool_in_process import tool

from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration.flags import (
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


@pytest.mark.parametrize("name", [option.name for option in LAYER.values() if option.of])
def test_every_option_of_moe_config_is_a_flag_and_reaches_the_layer(name):
    values = settings_of(name)[0]
    words = {"model": [], "task": []}
    for option in (LAYER[each] for each in values):
        value = values[option.name]
        words[option.of].append(option.flag if value is True else f"{option.flag}={value}")
    _, model = _parse(ModelOptions, words["model"])
    _, task = _parse(SystemOptions, words["task"])
    config = layer_config(model, task, 4, **OF_LAYER)
    assert (
        config == MoEConfig(num_experts=4, **values, **OF_LAYER) != layer_config(None, None, 4, **OF_LAYER)
    )


def test_a_configuration_saved_before_an_option_existed_still_builds_a_layer():
    values = defaults(ModelOptions)
    for option in LAYER.values():
        values.pop(option.key, None)
    assert layer_config(argparse.Namespace(**values), None, 8, **OF_LAYER) == MoEConfig(8, 16, 8)


def test_expert_counts():
    assert expert_counts("8", 3) == [8, 8, 8]
    assert expert_counts("8,8,16", 3) == [8, 8, 16]
    assert expert_counts(4, 1) == [4]


def test_flags_are_found_by_a_part_of_their_name_or_help():
    text = tool("flags", "Top-K")
    assert "Routing:\n  --moe-top-k (model)\n      experts per token, from 1 to" in text
    assert "Memory:" not in text and "--moe-freq" not in text
    for words in (["topk"], ["top_k"], ["top", "k"], ["--moe-top-k"]):
        assert "  --moe-top-k (model)\n" in tool("flags", *words)
    everything = tool("flags")
    for options in (EncoderDecoderOptions, SystemOptions, GateLossOptions):
        for key in defaults(options):
            assert f"  {flag_of(key)} (" in everything
    assert "(i + 1) % moe_freq == 0" in everything
    with pytest.raises(SystemExit, match="no flag has 'pigeon' in its name or help"):
        tool("flags", "pigeon")


def test_a_misspelt_override_is_refused():
    with pytest.raises(ValueError, match=r"moe_topk is not an option .* did you mean moe_top_k"):
        checkpoint_utils.load_checkpoint_to_cpu("nowhere.pt", {"moe_freq": 1, "moe_topk": 1})


def test_overrides_of_options_of_fairseq_and_of_users_are_accepted():
    refuse_misspelt({"moe_top_k": 1, "world_size": 1, "dropout": 0, "moe_of_my_own": 2})
