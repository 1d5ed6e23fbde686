"""What a fairseq checkpoint says of the training that wrote it: names, options, and which are ours alone.

They stand in `cfg`, one part for each of model, task, criterion and optimizer, or, in older files, all
together in `args`; the options of an encoder-decoder are a flat copy of everything within `cfg`.
"""

import argparse
from collections.abc import Collection
from typing import Any

from fairseq_tutel.moe import config
from fairseq_tutel.moe.options import plain

Options = dict[str, Any]

# A part, and its name's key where everything is flat.
PARTS = {"model": "arch", "task": "task", "criterion": "criterion", "optimizer": "optimizer"}

# Keys of what says how experts are computed and logged here, and nowhere else.
RUN_OPTIONS = [
    option.key
    for part in ("task", "criterion")
    for option in config.options_of(part)
    if not option.metas
]


def model_options(state: dict[str, Any]) -> dict[str, Any]:
    """Return the model's options, to read and to change.

    Raises:
        ValueError: the checkpoint has none.
    """
    args, cfg = state.get("args"), state.get("cfg") or {}
    found = cfg.get("model") if args is None else args
    if isinstance(found, argparse.Namespace):
        return vars(found)
    if not isinstance(found, dict):
        raise ValueError(
            "the checkpoint says nothing of its model (neither args nor cfg); give one of a fairseq "
            "training."
        )
    return found


def name_of(state: dict[str, Any], part: str) -> str:
    """Return the name of the architecture, task, criterion or optimizer; empty where there is none."""
    args, cfg = state.get("args"), state.get("cfg") or {}
    if args is not None:
        return str(getattr(args, PARTS[part], None) or "")
    options = cfg.get(part)
    options = vars(options) if isinstance(options, argparse.Namespace) else options or {}
    return str(options.get("_name") or options.get(PARTS[part]) or "")


def rename(state: dict[str, Any], part: str, name: str) -> None:
    """Set the name of the architecture, task, criterion or optimizer wherever it stands."""
    cfg = state.get("cfg") or {}
    own = cfg.get(part)
    if isinstance(own, argparse.Namespace):
        own._name = name
    elif isinstance(own, dict):
        own["_name"] = name
    for flat in (state.get("args"), *cfg.values()):
        if isinstance(flat, argparse.Namespace) and hasattr(flat, PARTS[part]):
            setattr(flat, PARTS[part], name)


def options_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a part's own options, to read and to change; of older files all options."""
    own = (state.get("cfg") or {}).get(part) if state.get("args") is None else state["args"]
    if isinstance(own, argparse.Namespace):
        return vars(own)
    return own if isinstance(own, dict) else {}


def drop(state: dict[str, Any], keys: Collection[str]) -> None:
    """Take options out of every part, and out of what is flat."""
    for options in (model_options(state), *(options_of(state, part) for part in PARTS)):
        for key in keys:
            options.pop(key, None)


def our_defaults() -> Options:
    """Return our options of a model with their defaults."""
    return {option.key: option.default for option in config.options_of("model")}


def top_k_of(ours: Options) -> int:
    """Return K of a model of ours, all of whose options are given."""
    return 1 if ours["moe_top1_expert"] else int(ours["moe_top_k"])


def refuse(option: str, value: Any, layer: str) -> None:
    """Refuse a model that another system cannot compute.

    Args:
        option: that it was trained with.
        value: of it.
        layer: whose layer has no counterpart: Meta's, Tutel's.
    """
    raise ValueError(
        f"the model was trained with {option} {value}, which {layer} layer has no counterpart of; convert "
        "a model without it."
    )


def refuse_what_only_ours_compute(ours: Options, layer: str) -> None:
    """Refuse options without which a model would compute something else, in evaluation too."""
    for option in config.options_of("model"):
        value = plain(ours[option.key])
        if option.common is not None and not option.common(value):
            refuse(option.flag, value, layer)
