"""Writes each member of an ensemble as a checkpoint of its own."""

import copy
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import PARTS, SavedModel, write_all
from fairseq_tutel.ensemble.options import CMCLConfig, EnsembleConfig
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import options_in

NAME = "ensemble_of"


def ensemble_size(saved: SavedModel) -> int:
    """Return the number of members.

    Raises:
        ValueError: it is no ensemble.
    """
    if saved.name("model") != NAME:
        raise ValueError(
            f"--input names {saved.path}, a checkpoint of {saved.name('model') or 'an unknown model'}; "
            f"give one of --arch {NAME}."
        )
    return int(saved.options["ensemble_size"])


def write_members(saved: SavedModel, paths: Sequence[Path]) -> None:
    """Write the members of an ensemble, one to each path.

    Raises:
        ValueError: a file could not be written.
    """
    write_all((path, member(saved, m).state) for m, path in enumerate(paths))


def member(saved: SavedModel, number: int) -> SavedModel:
    """Return one member as a checkpoint; the ensemble's stays unchanged."""
    prefix, left_out = f"members.{number}.", ("model", "last_optimizer_state")
    rest = {key: value for key, value in saved.state.items() if key not in left_out}
    made = SavedModel(copy.deepcopy(rest))
    made.restart({k.removeprefix(prefix): t for k, t in saved.weights.items() if k.startswith(prefix)})
    _use_member_options(made)
    return made


def _use_member_options(made: SavedModel) -> None:
    """Set the options of a model that was trained alone."""
    plugin.register()
    from fairseq.models import ARCH_MODEL_REGISTRY

    arch, criterion = made.options["ensemble_arch"], made.name("criterion")
    model_class = ARCH_MODEL_REGISTRY.get(arch)
    if criterion.removeprefix("moe_") == "cmcl":
        images = "image_classification"  # a task, and its criterion
        stock = images if made.name("task").removeprefix("moe_") == images else "cross_entropy"
        made.rename("criterion", criterion.replace("cmcl", stock))
    made.rename("model", arch)
    keys = [option.key for table in (EnsembleConfig, CMCLConfig) for option in options_in(table)]
    if not getattr(model_class, "has_experts", False):
        keys += [option.key for part in ("task", "criterion") for option in options_of(part)]
        for part in PARTS:
            made.rename(part, made.name(part).removeprefix("moe_"))
    made.drop(keys)
    dataclass = getattr(model_class, "__dataclass", None)
    if dataclass is not None and (made.state.get("cfg") or {}).get("model") is not None:
        # fairseq warns about a Namespace for a model with a dataclass.
        own = made.options_of("model")
        known = {item.name for item in fields(dataclass)}
        made.state["cfg"]["model"] = {**{k: own[k] for k in own.keys() & known}, "_name": arch}
