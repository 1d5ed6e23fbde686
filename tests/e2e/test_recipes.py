"""The flags file and the hydra file of a recipe in configs/ build equal models, and tiny recipes train."""

import argparse
import copy
import functools
import shlex
from unittest import mock

import pytest
import torch
from cli import ROOT, USER_DIR, fairseq
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fairseq_tutel.option import key_of
from fairseq_tutel.plugin import register

register()

ARGS = ROOT / "configs" / "args"
HYDRA = ROOT / "configs" / "hydra"
ARGS_ALONE = {"zcode_small"}  # hydra cannot create a task without a dataclass
RECIPES = sorted({path.stem for path in ARGS.glob("*.args")} - ARGS_ALONE)
GPT2_VOCABULARY, WMT_VOCABULARY = 50_257, 32_768
# With this assumed vocabulary size, the dense Z-code model has its published 0.7 billion parameters.
ZCODE_VOCABULARY = 192_000
SIZES = {  # for each recipe: (vocabulary size, billions of parameters)
    "gpt_125m_8_experts": (GPT2_VOCABULARY, 0.32),
    "gpt_125m_64_experts": (GPT2_VOCABULARY, 1.91),
    "gpt_350m_128_experts": (GPT2_VOCABULARY, 13.15),
    "gpt_350m_pr_moe": (GPT2_VOCABULARY, 4.12),
    "iwslt14_de_en": (10_000, 0.087),
    **{f"parallel_{form}": (4_000, 0.0017) for form in ("e", "e_d", "e_z", "e_z_offload")},
    "parallel_e_d_m": (4_000, 0.0009),
    "tiny_deepspeed": (4_000, 0.0050),
    "tiny_lm": (4_000, 0.0029),
    "tiny_pregated": (4_000, 0.0043),
    "tiny_translation": (4_000, 0.0043),
    "wmt_en_de_big": (WMT_VOCABULARY, 1.77),
    "zcode_8_experts": (ZCODE_VOCABULARY, 1.8),
    "zcode_64_experts": (ZCODE_VOCABULARY, 10.2),
}


def _task(vocabulary):
    dictionary = Dictionary()
    for i in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(str(i))
    return mock.Mock(source_dictionary=dictionary, target_dictionary=dictionary, cfg=argparse.Namespace())


def _words(recipe):
    return shlex.split((ARGS / f"{recipe}.args").read_text())


@functools.cache
def _from_args(recipe):
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, ["data", *_words(recipe)]))


def _from_hydra(recipe):
    hydra_init()
    with initialize_config_dir(config_dir=str(HYDRA), version_base="1.1"):
        cfg = compose(recipe, overrides=["task.data=data"])
    add_defaults(cfg)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))


def _built(cfg, vocabulary):
    with torch.device("meta"):
        return models.build_model(copy.deepcopy(cfg.model), _task(vocabulary))


def _shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_every_recipe_has_a_flags_file_a_hydra_file_and_a_table_row():
    assert sorted(path.stem for path in HYDRA.glob("*.yaml")) == RECIPES == sorted(SIZES)
    table = (ROOT / "configs" / "README.md").read_text()
    assert all(f"| `{recipe}` |" in table for recipe in (*RECIPES, *ARGS_ALONE))


# Prefixes of recipes whose models only `make test-long` builds.
LARGE = ("parallel_", "zcode_64", "gpt_125m_64", "gpt_350m_128")


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=[pytest.mark.long] * r.startswith(LARGE)) for r in RECIPES]
)
def test_both_files_of_a_recipe_build_a_model_with_the_listed_number_of_parameters(recipe):
    vocabulary, billions = SIZES[recipe]
    by_args, by_hydra = (_built(read(recipe), vocabulary) for read in (_from_args, _from_hydra))
    assert _shapes(by_args) == _shapes(by_hydra)
    assert str(by_args) == str(by_hydra)  # this text also has options such as dropout
    size = sum(parameter.numel() for parameter in by_args.parameters()) / 1e9
    assert size == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_files_of_a_recipe_have_the_same_training_options(recipe):
    by_args = OmegaConf.to_container(_from_args(recipe), enum_to_str=True)
    cfg = OmegaConf.load(HYDRA / f"{recipe}.yaml")
    given = {
        {"_name": {"model": "arch"}.get(section, section)}.get(key, key)
        for section in set(cfg) - {"hydra"}
        for key in cfg[section]
    }
    flags = {key_of(word) for word in _words(recipe) if word.startswith("--")}
    assert flags == given - {"data"}
    sections = set(cfg) - {"hydra", "model"}
    assert sections >= {"task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset"}
    for section in sections:
        for key, value in OmegaConf.to_container(cfg[section], resolve=False).items():
            if key not in ("data", "user_dir"):
                assert by_args[section][key] == value, f"{section}.{key}"


TINY = {name: name in ("tiny_deepspeed", "tiny_pregated") for name in RECIPES if "tiny" in name}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * long) for n, long in TINY.items()]
)
def test_a_tiny_recipe_trains(name, request, tmp_path):
    data = request.getfixturevalue("lm_data" if name in ("tiny_lm", "tiny_deepspeed") else "mt_data")
    words = _words(name)
    words[words.index("--user-dir") + 1] = USER_DIR
    run = fairseq(
        "train", data, *words, "--save-dir", tmp_path, "--max-update", 2, "--log-interval", 1,
        "--required-batch-size-multiple", 1, "--cpu",
    )  # fmt: skip
    assert len(run.stats("train_inner")) == 2
