"""Reads options per MoE layer, as 3,5 for all or decoder_1=3,5 encoder_3=0 for some, and experts' loads.

A load of 1 is that of an even distribution. Loads are read from a training log or the command line.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fairseq_tutel.checkpoint.saved import Layer
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools.training_log import LOAD, find_log, join

T = TypeVar("T")
Loads = dict[Layer, list[float]]
# Default number of log records for the mean.
LAST = 20


def by_layer(
    flag: str, words: Sequence[str], layers: Sequence[Layer], read: Callable[[str], T]
) -> dict[Layer, T]:
    """Return the values of an option by layer.

    Args:
        flag: the option, for errors.
        words: one word without a layer's label, or several with labels.
        layers: MoE layers of the checkpoint.
        read: parses a word; its ValueError has the reason and the expected form.

    Raises:
        ValueError: a word is invalid.
    """
    named = {layer.label: layer for layer in layers}
    found: dict[Layer, T] = {}
    for word in words:
        label, equals, text = word.rpartition("=")
        if not equals and len(words) > 1:
            raise ValueError(
                f"{flag} is {' '.join(words)}; give one value for all layers, or LAYER=… for each."
            )
        if equals and (label not in named or named[label] in found):
            raise ValueError(
                f"{flag} has {word}, but {label} is given twice or no layer with experts; there are "
                f"{', '.join(named)}."
            )
        try:
            value = read(text)
        except ValueError as error:
            raise ValueError(f"{flag} has {word or 'an empty word'}, where {error}.") from None
        found |= {named[label]: value} if equals else dict.fromkeys(layers, value)
    return found


def ids(text: str) -> list[int]:
    """Read expert IDs, separated by commas, each once."""
    parts = text.split(",")
    for part in parts:
        if not re.fullmatch(r"\s*[0-9]+\s*", part):
            raise ValueError(f"{part!r} is no expert ID; give IDs with commas between them, as 0,3")
    found = [int(part) for part in parts]
    refuse_twice(found)
    return found


def refuse_twice(found: Sequence[int]) -> None:
    """Refuse a repeated ID."""
    for i in found:
        if found.count(i) > 1:
            raise ValueError(f"expert {i} is named twice; name it once")


def refuse_unknown(flag: str, layer: Layer, found: Sequence[int], num_experts: int) -> None:
    """Refuse IDs of experts that a layer does not have."""
    for i in found:
        if not 0 <= i < num_experts:
            raise ValueError(
                f"{flag} names expert {i}, but {layer.label} has {num_experts}; give IDs from 0 to "
                f"{num_experts - 1}."
            )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for loads."""
    source = parser.add_mutually_exclusive_group()
    text = "read the loads from this training log with --log-format json, or from the one in this"
    source.add_argument("--log", metavar="PATH", help=f"{text} --save-dir")
    text = "the loads, one number per expert, as 0.5,2,1,0.5, or by layer, as decoder_1=0.5,1.5"
    source.add_argument("--load", nargs="+", metavar="LOADS", help=text)
    text = f"number of the last log records for the mean [{LAST}]"
    parser.add_argument("--last-records", type=int, metavar="N", help=text)


def loads(arguments: argparse.Namespace, layers: Mapping[Layer, MoEConfig]) -> Loads:
    """Return the given loads by layer.

    Raises:
        ValueError: a log lacks them, or has another number of experts.
    """
    last = arguments.last_records
    if last is not None and last < 1:
        raise ValueError(f"--last-records is {last}; give a number of at least 1.")
    if last is not None and arguments.log is None:
        raise ValueError(f"--last-records is {last}, which needs --log; add it, or leave this out.")
    found: Loads = {}
    if arguments.log is not None:
        found = of_log(Path(arguments.log), list(layers), LAST if last is None else last)
    elif arguments.load is not None:
        found = by_layer("--load", arguments.load, list(layers), _numbers)
    for layer, load in found.items():
        if len(load) != layers[layer].num_experts:
            raise ValueError(
                f"--load or --log has {len(load)} loads for {layer.label}, which has "
                f"{layers[layer].num_experts} experts; give one per expert, or the log of this model."
            )
        if not any(load):
            raise ValueError(
                f"--load or --log has only loads of 0 for {layer.label}; give one above 0, or leave it out."
            )
    return found


def of_log(path: Path, layers: list[Layer], last: int) -> Loads:
    """Return the mean loads of all layers over the last records of a training log.

    Raises:
        ValueError: there is no log, or it lacks the loads of a layer.
    """
    records = join(find_log(path)[0]).training
    found: Loads = {}
    for layer in layers:
        key = LOAD + layer.label
        lists = [record.lists[key] for record in records if key in record.lists]
        if not lists:
            raise ValueError(
                f"--log names {path}, which has no {key}; give the log of a training run of this "
                "model with a moe_ criterion and --log-format json."
            )
        if len({len(load) for load in lists[-last:]}) > 1:
            raise ValueError(f"--log names {path}, in which the number of experts changes; name another.")
        found[layer] = [statistics.fmean(of_one) for of_one in zip(*lists[-last:], strict=True)]
    return found


def _numbers(text: str) -> list[float]:
    parts = text.split(",")
    for part in parts:
        try:
            is_load = 0 <= float(part) < 1e12
        except ValueError:
            is_load = False
        if not is_load:
            raise ValueError(
                f"{part!r} is no load; give a number of at least 0 for each expert, as 0.5,2,1,0.5"
            )
    return [float(part) for part in parts]
