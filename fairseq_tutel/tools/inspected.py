"""The facts of a checkpoint, as plain dictionaries and lists."""

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.files import is_whole
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.tools.convert.expert_load import LAST, of_log
from fairseq_tutel.tools.convert.layers import Layer, layers_of
from fairseq_tutel.tools.convert.options import PARTS, model_options, name_of
from fairseq_tutel.tools.convert.our_options import flag, our_defaults, plain
from fairseq_tutel.tools.inspected_shards import described_shards, refuse_changed, shards_in

OURS, DENSE = "fairseq_tutel, with experts", "fairseq, dense"
# What gives another system's file away: a part of a tensor's name.
SIGNS = {
    "Meta's moe branch, one rank's experts": ".moe_layer.experts.",
    "Meta's moe branch, what all ranks share": ".moe_layer.",
    "Tutel, one rank's part": "_num_global_experts",
    "Tutel, one rank's part or a layer": "batched_fc1_w",
    "fairseq_tutel, the state dict of a layer or model": "experts.fc1_weight",
}
# In the name of a tensor, ours or another system's.
EXPERTS = re.compile(r"(?:^|\.)experts\.")
# Options that the table of layers shows.
IN_TABLE = ("moe_freq", "encoder_moe_freq", "decoder_moe_freq", "moe_expert_count")
Facts = dict[str, Any]


def described(state: Any, path: Path, log: str | None = None, check: bool = False) -> Facts:
    """Return what an opened file holds.

    Args:
        state: as `load_any` gives it.
        path: of the file.
        log: of the training, for the loads of experts; None for none.
        check: read everything, and compare it with the check sums.

    Raises:
        ValueError: no tensors, shards that are missing or torn, or a log that is not the model's.
    """
    is_checkpoint = isinstance(state, dict) and isinstance(state.get("model"), dict)
    if is_checkpoint:
        bind(state, path)
    shards = shards_in(state)
    weights = dict(_tensors(state["model"] if is_checkpoint else state))
    if not weights:
        raise ValueError(f"FILE names {path}, which holds no tensors; give a checkpoint.")
    layers = [layer for layer in layers_of(weights) if layer.has_experts]
    facts: Facts = {"file": str(path), "bytes_of_file": path.stat().st_size}
    facts["kind"] = _kind(weights, layers, is_checkpoint)
    if shards:
        facts["shards"] = described_shards(shards)
    if check:
        refuse_changed(shards)
        facts["checked"] = _is_checked(path)
    experts = {key for key in weights if EXPERTS.search(key)}
    facts["bytes"] = {
        "experts": _bytes(weights[key] for key in experts),
        "other weights": _bytes(weights[key] for key in weights if key not in experts),
    }
    if is_checkpoint:
        facts["bytes"]["optimizer state"] = _bytes(
            tensor for _, tensor in _tensors(state.get("last_optimizer_state"))
        )
        facts |= _of_training(state)
    if layers:
        facts["layers"] = [_layer(weights, layer) for layer in layers]
    if layers and is_checkpoint:
        facts["options"] = _not_defaults(model_options(state))
    if log is not None:
        _add_loads(facts, layers, Path(log))
    facts["tensors"] = _grouped(weights)
    return facts


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of nested dictionaries and lists."""
    if isinstance(tree, (Tensor, ShardedTensor)):
        yield prefix, tree
    elif isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _is_checked(path: Path) -> bool:
    """Whether a file has check sums, all of which are right.

    Raises:
        ValueError: one is wrong.
    """
    if not is_whole(str(path)):
        raise ValueError(
            f"FILE names {path}, whose bytes are not what was saved; give an older checkpoint."
        )
    return zipfile.is_zipfile(path)


def _kind(weights: Mapping[str, Any], layers: list[Layer], is_checkpoint: bool) -> str:
    if layers and is_checkpoint:
        return OURS
    for kind, sign in SIGNS.items():
        if any(sign in key for key in weights):
            return kind
    return DENSE if is_checkpoint else "tensors"


def _bytes(tensors: Any) -> int:
    """Return the bytes of tensors, each storage once."""
    total, seen = 0, set()
    for tensor in tensors:
        identity = (tensor.data_ptr(), tensor.shape) if isinstance(tensor, Tensor) else id(tensor)
        if identity not in seen:
            total += torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
            seen.add(identity)
    return total


def _of_training(state: Mapping[str, Any]) -> Facts:
    names = {part: name_of(dict(state), part) for part in PARTS}
    history = state.get("optimizer_history") or [{}]
    place = (state.get("extra_state") or {}).get("train_iterator") or {}
    return {
        "names": {part: name for part, name in names.items() if name},
        "updates": history[-1].get("num_updates"),
        "epoch": place.get("epoch"),
        "batches_in_epoch": place.get("iterations_in_epoch"),
    }


def _layer(weights: Mapping[str, Any], layer: Layer) -> Facts:
    prefix = f"{layer.step}.experts."
    stacks = {key.removeprefix(prefix): t for key, t in weights.items() if key.startswith(prefix)}
    own = {name: tensor for name, tensor in stacks.items() if "." not in name}
    first = next(iter(own.values()))
    rest = f"{layer.step}."
    return {
        "layer": layer.label,
        "experts": first.shape[0],
        "shapes": {name: list(tensor.shape[1:]) for name, tensor in own.items()},
        "dtype": _dtype(first),
        "bytes": _bytes(stacks.values()),
        "beside": {
            key.removeprefix(rest): list(tensor.shape)
            for key, tensor in weights.items()
            if key.startswith(rest) and not key.startswith(prefix)
        },
    }


def _not_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's options of experts that are not the defaults, by their flags."""
    return {
        flag(key): plain(options[key])
        for key, default in our_defaults().items()
        if key in options and key not in IN_TABLE and plain(options[key]) not in (None, default)
    }


def _add_loads(facts: Facts, layers: list[Layer], log: Path) -> None:
    """Add each layer's mean loads over the last records of a training."""
    if not layers:
        raise ValueError(
            f"--log is given, but FILE names {facts['file']}, which has no experts; leave it out."
        )
    loads = of_log(log, layers, LAST)
    for layer, entry in zip(layers, facts.get("layers", []), strict=True):
        if len(loads[layer]) != entry["experts"]:
            raise ValueError(
                f"--log names {log}, where {layer.label} has {len(loads[layer])} experts, and FILE has "
                f"{entry['experts']}; give the log of this model."
            )
        entry["load"] = loads[layer]


def _grouped(weights: Mapping[str, Any]) -> list[Facts]:
    """Return the tensors by name, shape and dtype, those whose names differ in numbers alone in one."""
    groups: dict[tuple[str, tuple[int, ...], str], int] = {}
    for key, tensor in weights.items():
        group = (re.sub(r"(?<=\.)\d+(?=\.)", "N", key), tuple(tensor.shape), _dtype(tensor))
        groups[group] = groups.get(group, 0) + 1
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "number": number}
        for (name, shape, dtype), number in groups.items()
    ]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
