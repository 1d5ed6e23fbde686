"""Compares a checkpoint with the model that loads it: logs changed options, and refuses other experts.

This holds for training, for models that are opened, and for tools. The layers that have experts, and their
numbers, are read from the checkpoint's tensors, because fairseq can prune layers when it loads them.
"""

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

from fairseq_tutel.checkpoint.saved import layer_label
from fairseq_tutel.files import shown
from fairseq_tutel.option import flag_of, plain
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.registration.flags import expert_counts

logger = logging.getLogger(__name__)

# Options that choose the layers with experts.
PLACES = {"moe_freq", "encoder_moe_freq", "decoder_moe_freq", "swin_expert_stages"}
COUNT = "moe_expert_count"
_STACK = re.compile(r"(.+)\.experts\.[^.]+")


class Saved(TypedDict):
    """What a checkpoint says of its model. A plain dictionary, because a configuration may hold it."""

    path: str
    options: dict[str, Any]  # of the model
    experts: dict[str, int]  # the number of experts by the qualified name of the layer


def saved_model(state: Any, path: str, options: Mapping[str, Any]) -> Saved:
    """Return what a loaded checkpoint says of its model; raise ValueError if experts are missing."""
    experts: dict[str, int] = {}
    for key, tensor in (state.get("model") or {}).items():
        if (found := _STACK.fullmatch(key)) and len(tensor.shape):
            experts.setdefault(found[1], tensor.shape[0])
    _refuse_part(path, experts, options)
    return {"path": path, "options": dict(options), "experts": experts}


def _refuse_part(path: str, experts: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Raise ValueError if a file has the experts of only one rank: fairseq saves it after an exception."""
    text = str(options.get(COUNT, ""))
    if not experts or not text.isdecimal():
        return
    parts = {int(text) / max(1, count) for count in experts.values()}
    if len(parts) == 1 and (ranks := parts.pop()) > 1 and ranks.is_integer():
        name, count = next(iter(experts.items()))
        raise ValueError(
            f"{path} has {count} of the {text} experts of {layer_label(name)}, as a file that one rank "
            "saves after an error; give a checkpoint that all ranks saved together."
        )


def experts_in(saved: Saved, name: str) -> int:
    """Return the number of experts that a checkpoint has in a layer; the layer's name may lack a prefix.

    A model inside another model has such a prefix in the checkpoint.
    """
    return next((n for key, n in saved["experts"].items() if f".{key}".endswith(f".{name}")), 0)


def changes(saved: Saved, cfg: Any) -> dict[str, tuple[Any, Any]]:
    """Return the values (saved, given) of each option of the model `cfg` that differs, by key."""
    defaults = {option.key: option.default for option in options_of("model")}
    found, has_ours = {}, "moe_freq" in saved["options"]
    for key in _model_keys(cfg):
        if key not in saved["options"] and not (has_ours and key in defaults):
            continue
        if key.endswith("_layers_to_keep") or getattr(cfg, f"{key}_to_keep", None):
            continue  # pruning changes the number of layers
        before = plain(saved["options"].get(key, defaults.get(key)))
        now = plain(getattr(cfg, key, before))
        if str(before) != str(now) and not isinstance(before, dict):
            found[key] = (before, now)
    return found


def _model_keys(cfg: Any) -> list[str]:
    """Return the keys of the options of a model; a Namespace also has all other options of a run."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    model = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if model is not None:
        model.add_args(parser)
    return [action.dest for action in parser._actions]


def log_changes(saved: Saved | None, cfg: Any) -> None:
    """Log each option of the model that differs from the checkpoint's, in one line, on rank 0.

    An option that the checkpoint lacks is not logged.
    """
    for key, (before, now) in changes(saved, cfg).items() if saved and world.is_first() else ():
        if saved and key in saved["options"]:
            line = "%s: %s: %s (saved) → %s (given)"
            logger.warning(line, saved["path"], flag_of(key), shown(before), shown(now))


def refuse_layers(saved: Saved, cfg: Any, layers: Sequence[Any]) -> None:
    """Raise ValueError if this run's options choose other layers, or numbers, of experts than were saved.

    Args:
        saved: the checkpoint.
        cfg: the model's options.
        layers: the MoE layers of the model, with a name and the number of experts in the checkpoint.
    """
    changed, path = changes(saved, cfg), saved["path"]
    for key in PLACES & changed.keys():
        before, now = changed[key]
        raise ValueError(
            f"{path} was saved with {flag_of(key)} {before}, this run has {now}; give "
            f"{flag_of(key)} {before}."
        )
    if COUNT not in changed:
        return
    before, now = changed[COUNT]
    for layer, number in zip(layers, expert_counts(now, len(layers)), strict=True):
        if layer.num_experts != number:
            raise ValueError(
                f"{path} was saved with {layer.num_experts} experts in {layer_label(layer.name)}, this run "
                f"has {number}; give {flag_of(COUNT)} {before}, or change the file with `fairseq-tutel "
                "convert prune` or `merge`."
            )
