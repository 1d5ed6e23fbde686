"""Parses options that have a value for each MoE layer, and reads the scores of experts.

The value "3,5" applies to all layers; "decoder_1=3,5 encoder_3=0" gives values for two layers. Expert loads
come from a training log or the command line; at even load, all loads are 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fairseq_tutel.tools.training_log import LOAD, find_log, join

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.saved import Layer
    from fairseq_tutel.moe.config import MoEConfig

    Configs = Mapping[Layer, MoEConfig]

T = TypeVar("T")
# Expert loads are averaged over this many of the latest log records.
LAST = 20


def by_layer(
    flag: str, words: Sequence[str], layers: Sequence[Layer], read: Callable[[str], T]
) -> dict[Layer, T]:
    """Parse an option that has one value for all MoE layers, or the form LAYER=VALUE for some layers.

    The function `read` parses a layer's value. Its ValueError must give the reason and the correct form.

    Raises:
        ValueError: a word of the option is invalid.
    """
    named = {layer.label: layer for layer in layers}
    found: dict[Layer, T] = {}
    for word in words:
        label, equals, text = word.rpartition("=")
        if (not equals and len(words) > 1) or (equals and label not in named):
            raise ValueError(
                f"{flag} is {' '.join(words)}; give one value for all layers, or LAYER=VALUE with layers "
                f"from {', '.join(named)}."
            )
        try:
            value = read(text)
        except ValueError as error:
            raise ValueError(f"{flag} has {word or 'an empty word'}, but {error}.") from None
        found |= {named[label]: value} if equals else dict.fromkeys(layers, value)
    return found


def expert_ids(
    flag: str, words: Sequence[str], configs: Configs, or_all: bool = False
) -> dict[Layer, list[int]]:
    """Parse an option that lists expert IDs per MoE layer, such as 0,3.

    With `or_all`, error messages also mention the word `all`, which the caller handles.

    Raises:
        ValueError: a word is invalid, an expert ID is repeated, or a layer has no expert with this ID.
    """

    def read(text: str) -> list[int]:
        for part in text.split(","):
            if not part.strip().isdecimal():
                raise ValueError(
                    f"{part!r} is not an expert ID; give IDs separated by commas, such as "
                    f"0,3{', or all' * or_all}"
                )
        ids = [int(part) for part in text.split(",")]
        for i in ids:
            if ids.count(i) > 1:
                raise ValueError(f"expert {i} is named twice; name it once")
        return ids

    found = by_layer(flag, words, list(configs), read)
    for layer, ids in found.items():
        last, most = configs[layer].num_experts - 1, max(ids)
        if most > last:
            raise ValueError(
                f"{flag} names expert {most}, but {layer.label} has {last + 1} experts; give IDs from 0 to "
                f"{last}."
            )
    return found


def loads(arguments: argparse.Namespace, configs: Configs) -> dict[Layer, list[float]]:
    """Return the expert loads of each layer from --log or --load, or {} if neither is given.

    Raises:
        ValueError: the log has no expert loads, or the number of loads is not the number of experts.
    """
    if arguments.log is not None:
        found = of_log(Path(arguments.log), list(configs))
    else:
        found = by_layer("--load", arguments.load or (), list(configs), _numbers)
    for layer, load in found.items():
        if len(load) != configs[layer].num_experts:
            raise ValueError(
                f"--load or --log has {len(load)} loads for {layer.label}, which has "
                f"{configs[layer].num_experts} experts; give one load per expert, or the log of this model."
            )
        if not any(load):
            raise ValueError(
                f"--load or --log has only loads of 0 for {layer.label}; give a load above 0, or leave out "
                "this layer."
            )
    return found


def scores(arguments: argparse.Namespace, configs: Configs) -> dict[Layer, list[float]]:
    """Return the score of each expert, by which `convert prune` chooses the experts to remove.

    The scores are loads from --log or --load, or loads or importances from --statistics. The function
    returns {} if none of these options is given.

    Raises:
        ValueError: the options exclude each other, or the statistics file does not fit the model.
    """
    if arguments.statistics is None:
        if arguments.by == "importance":
            raise ValueError(
                "--by is importance, but only a file of `tokens --output-statistics` has it; add "
                "--statistics FILE."
            )
        if arguments.keep_for is not None:
            raise ValueError(
                f"--keep-for is {arguments.keep_for}, but no statistics of language pairs are given; add "
                "--statistics FILE, or remove --keep-for."
            )
        return loads(arguments, configs)
    from fairseq_tutel.inference.expert_statistics import of_layer, pooled, read_statistics

    path, flag = arguments.statistics, "--statistics"
    pairs = arguments.keep_for.split(",") if arguments.keep_for is not None else ()
    statistics = pooled(read_statistics(path, flag), pairs, path, "--keep-for")
    found = {
        layer: of_layer(statistics, layer.label, config.num_experts, path, flag)
        for layer, config in configs.items()
    }
    return {
        layer: each.importance if arguments.by == "importance" else list(each.load)
        for layer, each in found.items()
    }


def of_log(path: Path, layers: list[Layer]) -> dict[Layer, list[float]]:
    """Return the mean expert loads of all layers over the last records of a training log.

    Raises:
        ValueError: the training log does not exist, or lacks the loads of a layer.
    """
    records = join(find_log(path)[0]).training
    found = {}
    for layer in layers:
        key = LOAD + layer.label
        lists = [record.lists[key] for record in records if key in record.lists]
        if not lists:
            raise ValueError(
                f"--log names {path}, which has no {key}; give the log of a training run of this "
                "model with a moe_ criterion and --log-format json."
            )
        found[layer] = [statistics.fmean(of_one) for of_one in zip(*lists[-LAST:], strict=True)]
    return found


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= load < 1e12 for load in found):
        raise ValueError("each load must be a number of at least 0, as in 0.5,2,1,0.5")
    return found
