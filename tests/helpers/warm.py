"""Prepares hydra configurations in the fork server, so that a child process need not read 370 options.

Hydra composes a configuration from the parts that the command line names. The server composes the usual
configurations in advance, and a child process sets only the options that differ. Exit handlers of imported
modules are disabled, because the handlers slow down the end of each child process.
"""

import copy
import gc
import weakref
from argparse import ArgumentParser

from fairseq import options
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import fairseq_tutel.models  # noqa: F401
from tests.helpers import quick_hydra  # noqa: F401

_composed: dict[tuple[str, ...], tuple[set[str], DictConfig]] = {}
_compose = utils.compose


def compose(config_name: str, overrides: list[str], strict: bool) -> DictConfig:
    """Return hydra's configuration; adapt a prepared configuration with the same parts if there is one."""
    words, config = _composed.pop(_parts(overrides), (set(), None))
    if config is None:
        return _compose(config_name, overrides=overrides, strict=strict)
    changed = [word for word in overrides if word not in words]
    OmegaConf.set_struct(config, True)
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(changed), config)
    OmegaConf.set_struct(config, strict)
    return config


def prepare(parser: ArgumentParser, *words: str) -> None:
    """Compose a command line's configuration in advance, for the first call with the same parts."""

    def keep(config_name: str, overrides: list[str], strict: bool) -> DictConfig:
        config = _compose(config_name, overrides=overrides, strict=strict)
        _composed[_parts(overrides)] = set(overrides), copy.deepcopy(config)
        return config

    utils.compose = keep
    args = options.parse_args_and_arch(parser, ["data", *words])
    utils.convert_namespace_to_omegaconf(args)
    utils.compose = compose


def _parts(overrides: list[str]) -> tuple[str, ...]:
    """Return the hydra overrides without values, but keep the values that choose a config group."""
    names = (word.partition("=")[0] for word in overrides)
    return tuple(name if "." in name else word for name, word in zip(names, overrides, strict=True))


for words in (
    "--task moe_language_modeling --arch moe_transformer_lm --criterion moe_cross_entropy",
    "--task moe_translation --arch moe_transformer --criterion moe_label_smoothed_cross_entropy",
):
    for optimizer in ("moe_adam", "moe_sgd"):
        prepare(options.get_training_parser(), *words.split(), "--optimizer", optimizer)
for parser, task in (
    (options.get_generation_parser(), "translation"),
    (options.get_generation_parser(), "moe_translation"),
    (options.get_eval_lm_parser(), "language_modeling"),
    (options.get_validation_parser(), "moe_language_modeling"),
):
    prepare(parser, "--path", "checkpoint", "--task", task)

for imported in weakref.finalize._registry:
    imported.atexit = False
gc.freeze()  # A garbage collection would copy the memory pages of imported modules.
