"""What a fairseq checkpoint says of the training that wrote it: names, and their twins here, and options.

They stand in `cfg`, one part for each of model, task, criterion and optimizer, or, in older files, all
together in `args`; the options of an encoder-decoder are a flat copy of everything within `cfg`.
"""

import argparse
from collections.abc import Collection
from typing import Any

from fairseq_tutel.moe import config

Options = dict[str, Any]

# Its twin has moe behind it, not before.
SWIN = "swin_v2"

# A part, and its name's key where everything is flat.
PARTS = {"model": "arch", "task": "task", "criterion": "criterion", "optimizer": "optimizer"}

# Keys of what says how experts are computed and logged here, and nowhere else.
RUN_OPTIONS = [
    option.key
    for part in ("task", "criterion")
    for option in config.options_of(part)
    if not option.metas
]
# Of stock fairseq, what has a twin here that converters know.
ENCODER_DECODERS = (
    "transformer",
    "transformer_tiny",
    "transformer_iwslt_de_en",
    "transformer_wmt_en_de",
    "transformer_vaswani_wmt_en_de_big",
    "transformer_vaswani_wmt_en_fr_big",
    "transformer_wmt_en_de_big",
    "transformer_wmt_en_de_big_t2t",
)
TASKS = {
    "language_modeling": "moe_language_modeling",
    # Meta's own, which read the same kind of model; stock fairseq has them not, or not alike.
    "streaming_language_modeling": "moe_language_modeling",
    "multilingual_language_modeling": "moe_language_modeling",
    "translation": "moe_translation",
}
OPTIMIZERS = {
    "adam": "FairseqAdam",
    "sgd": "SGD",
    "nag": "FairseqNAG",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "FairseqAdamax",
}


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


def with_experts(name: str) -> str:
    """Return the name of the twin with experts of an architecture, task, criterion or optimizer."""
    return name.replace(SWIN, f"{SWIN}_moe", 1) if name.startswith(SWIN) else f"moe_{name}"


def without_experts(name: str) -> str:
    """Return the name of the dense twin."""
    return name.removeprefix("moe_").replace(f"{SWIN}_moe", SWIN)


def drop(state: dict[str, Any], keys: Collection[str]) -> None:
    """Take options out of every part, and out of what is flat."""
    for options in (model_options(state), *(options_of(state, part) for part in PARTS)):
        for key in keys:
            options.pop(key, None)


def our_defaults() -> Options:
    """Return our options of a model with their defaults."""
    return {option.key: option.default for option in config.options_of("model")}


def is_language_model(arch: str) -> bool:
    """Return whether an architecture, stock or ours, has a decoder alone."""
    return arch.removeprefix("moe_").startswith("transformer_lm")


def rename_to_ours(state: dict[str, Any], option: str) -> None:
    """Give the architecture and task of a checkpoint our names.

    Args:
        state: the checkpoint.
        option: of the command line that names it.

    Raises:
        ValueError: the architecture has no twin that these tools know.
    """
    arch, task = name_of(state, "model"), name_of(state, "task")
    if not is_language_model(arch) and arch not in ENCODER_DECODERS:
        raise ValueError(
            f"{option} has the architecture {arch or 'without a name'}, which has no twin here; there are "
            f"transformer_lm…, {', '.join(ENCODER_DECODERS)}."
        )
    rename(state, "model", f"moe_{arch}")
    rename(state, "task", TASKS.get(task, task))


def rename_to_stock(state: dict[str, Any]) -> None:
    """Give the architecture and task of a checkpoint of ours the names of stock fairseq.

    Raises:
        ValueError: Meta's branch of it has no such architecture.
    """
    arch, task = name_of(state, "model").removeprefix("moe_"), name_of(state, "task")
    if not is_language_model(arch) and arch not in ENCODER_DECODERS:
        raise ValueError(
            f"--input has the architecture {arch or 'without a name'}, and Meta's branch has experts in "
            "transformer_lm… and transformer… alone; give a checkpoint of such a model."
        )
    rename(state, "model", arch)
    stock = {ours: theirs for theirs, ours in reversed(TASKS.items())}
    rename(state, "task", stock.get(task, task))
