"""Describes the content of a checkpoint as dictionaries and lists, for the tool `inspect`."""

import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.files import is_whole
from fairseq_tutel.checkpoint.foreign import kind_of, refuse_malformed
from fairseq_tutel.checkpoint.saved import PARTS, Layer, SavedModel, layers_of
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.option import Option, plain

OURS, DENSE = "fairseq_tutel, with experts", "fairseq, dense"
EXPERTS = re.compile(r"(?:^|\.)experts\.")  # Matches the tensor names of experts.
Facts = dict[str, Any]


def describe(state: Any, path: Path, options: Sequence[Option], check: bool = False) -> Facts:
    """Return a description of a checkpoint file's content.

    `options` are all options that a MoE model can have. With `check`, wrong checksums raise ValueError.
    """
    is_checkpoint = isinstance(state, dict) and isinstance(state.get("model"), dict)
    if is_checkpoint:
        refuse_malformed(state, f"CHECKPOINT {path}")
        bind(state, path)
    shards = [tensor for _, tensor in _tensors(state) if isinstance(tensor, ShardedTensor)]
    weights = dict(_tensors(state["model"] if is_checkpoint else state))
    if not weights:
        raise ValueError(f"CHECKPOINT names {path}, which holds no tensors; give a checkpoint.")
    layers = [layer for layer in layers_of(weights, within=True) if layer.has_experts]
    is_ours = bool(layers) and is_checkpoint
    kind = OURS if is_ours else kind_of(weights) or (DENSE if is_checkpoint else "tensors")
    facts: Facts = {"file": str(path), "bytes_of_file": path.stat().st_size, "kind": kind}
    if shards:
        facts["shards"] = _described_shards(shards)
    if check:
        _verify(path, shards)
        facts["checked"] = zipfile.is_zipfile(path)  # Only zip files contain checksums.
    facts["bytes"] = {
        "experts": _bytes(tensor for key, tensor in weights.items() if EXPERTS.search(key)),
        "other weights": _bytes(tensor for key, tensor in weights.items() if not EXPERTS.search(key)),
    }
    if is_checkpoint:
        optimizer = _tensors(state.get("last_optimizer_state"))
        facts["bytes"]["optimizer state"] = _bytes(tensor for _, tensor in optimizer)
        facts |= _of_training(state)
    if layers:
        facts["layers"] = [_layer(weights, layer) for layer in layers]
    if is_ours:
        facts |= _changed_options(state, options)
    return {**facts, "tensors": _grouped(weights)}


def _verify(path: Path, shards: Iterable[ShardedTensor]) -> None:
    for tensor in shards:
        for expert in range(tensor.shape[0]):
            tensor.read(expert, 1)  # Reading raises an error for a wrong digest.
    if not is_whole(str(path)):
        raise ValueError(
            f"CHECKPOINT names {path}, whose bytes do not match their checksums; give an older checkpoint."
        )


def _changed_options(state: dict[str, Any], known: Sequence[Option]) -> Facts:
    """Return the MoE options of a checkpoint that differ from their defaults."""
    options = SavedModel(state).options_of("model")
    inner = options.get("w2v_args")  # w2v_args has the options of an inner pretrained model.
    options = inner.get("model", options) if isinstance(inner, dict) else options
    values = {option: plain(options[option.key]) for option in known if option.key in options}
    changed = {o.flag: value for o, value in values.items() if value not in (None, o.default)}
    return {"options": changed} if values else {}


def _tensors(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each tensor in nested containers; visit each container once."""
    seen, open_trees = set(), [("", tree)]
    while open_trees:
        prefix, node = open_trees.pop()
        if isinstance(node, (Tensor, ShardedTensor)):
            yield prefix, node
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            items = list(node.items() if isinstance(node, dict) else enumerate(node))
            named = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in items)
            open_trees.extend(reversed(list(named)))


def _bytes(tensors: Any) -> int:
    """Return the total size of tensors in bytes; tied tensors count once."""
    total, seen = 0, set()
    for tensor in tensors:
        identity = (tensor.data_ptr(), tensor.shape) if isinstance(tensor, Tensor) else id(tensor)
        if identity not in seen:
            total += tensor.nbytes if isinstance(tensor, Tensor) else tensor.stored_bytes
            seen.add(identity)
    return total


def _of_training(state: Mapping[str, Any]) -> Facts:
    saved = SavedModel(dict(state))
    names = {part: saved.name(part) for part in PARTS}
    history = state.get("optimizer_history") or [{}]
    place = (state.get("extra_state") or {}).get("train_iterator") or {}
    return {
        "names": {part: name for part, name in names.items() if name},
        "updates": history[-1].get("num_updates"),
        "epoch": place.get("epoch"),
        "batches_in_epoch": place.get("iterations_in_epoch"),
    }


def _layer(weights: Mapping[str, Any], layer: Layer) -> Facts:
    prefix = f"{layer.moe}."
    own = {key.removeprefix(prefix): t for key, t in weights.items() if key.startswith(prefix)}
    experts = {key.removeprefix("experts."): t for key, t in own.items() if key.startswith("experts.")}
    stacks = {name: tensor for name, tensor in experts.items() if "." not in name}
    first = next(iter(stacks.values()))
    return {
        "layer": layer.label,
        "experts": first.shape[0],
        "shapes": {name: list(tensor.shape[1:]) for name, tensor in stacks.items()},
        "dtype": _dtype(first),
        **_quantization(stacks),
        "bytes": _bytes(experts.values()),
        "beside": {key: list(t.shape) for key, t in own.items() if not key.startswith("experts.")},
    }


def _quantization(stacks: Mapping[str, Any]) -> Facts:
    """Return the stored dtype of quantized experts, and the experts' quantization errors."""
    found = {n: t for n, t in stacks.items() if isinstance(t, ShardedTensor) and t.expert_dtype}
    return found and {
        "stored": ", ".join(sorted({tensor.expert_dtype for tensor in found.values()})),
        "relative_error": {name: tensor.error[0] for name, tensor in found.items()},
        "worst_row_error": {name: tensor.error[1] for name, tensor in found.items()},
    }


def _grouped(weights: Mapping[str, Any]) -> list[Facts]:
    """Count the tensors that have the same name (ignoring layer numbers), shape and dtype."""
    groups = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "N", key), tuple(tensor.shape), _dtype(tensor))
        for key, tensor in weights.items()
    )
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "number": number}
        for (name, shape, dtype), number in groups.items()
    ]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described_shards(tensors: Iterable[ShardedTensor]) -> Facts:
    """Check the headers of all shard files, and return the files' folders, number and total size."""
    paths = set()
    for tensor in tensors:
        tensor.check_headers()
        paths |= {tensor.path_of(piece) for piece in tensor.pieces}
    return {
        "folders": sorted({str(path.parent) for path in paths}),
        "files": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
    }
