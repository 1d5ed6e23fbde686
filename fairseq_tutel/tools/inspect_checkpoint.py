"""inspect: say what a checkpoint holds: experts, shapes, bytes, options, updates, and loads by a log.

It opens ours, dense ones of fairseq, one file of Meta's moe branch or of Tutel, and other files of tensors.
Tensors stay in the file, and no pickled code runs.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.files import is_whole
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.files.small import printable
from fairseq_tutel.moe.options import flag_of, plain
from fairseq_tutel.checkpoint.reading import load_any
from fairseq_tutel.checkpoint.saved import Layer, layers_of
from fairseq_tutel.convert.names import PARTS, model_options, name_of, our_defaults
from fairseq_tutel.tools.convert.selection import LAST, of_log

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
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
Facts = dict[str, Any]


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("inspect", help="say what a checkpoint holds", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="a checkpoint")
    log = "add the experts' loads by this log of the training with --log-format json, or by the one in "
    parser.add_argument("--log", metavar="PATH", help=f"{log}this --save-dir")
    for name, text in (
        ("--tensors", "list the tensors of our own files too"),
        ("--check", "read everything, shard files too, and compare it with the check sums"),
        ("--json", "print everything as JSON"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print what the file holds."""
    path = Path(arguments.file)
    facts = _described(load_any(path, "FILE", only_look=True), path, arguments.log, arguments.check)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(printable("\n".join(_lines(facts, arguments.tensors))))


def _described(state: Any, path: Path, log: str | None, check: bool) -> Facts:
    """Return what an opened file holds, in plain dictionaries and lists; `check` reads everything."""
    is_checkpoint = isinstance(state, dict) and isinstance(state.get("model"), dict)
    if is_checkpoint:
        bind(state, path)
    shards = [tensor for _, tensor in _tensors(state) if isinstance(tensor, ShardedTensor)]
    weights = dict(_tensors(state["model"] if is_checkpoint else state))
    if not weights:
        raise ValueError(f"FILE names {path}, which holds no tensors; give a checkpoint.")
    layers = [layer for layer in layers_of(weights, within=True) if layer.has_experts]
    facts: Facts = {"file": str(path), "bytes_of_file": path.stat().st_size}
    facts["kind"] = _kind(weights, layers, is_checkpoint)
    if shards:
        facts["shards"] = _described_shards(shards)
    if check:
        for tensor in shards:
            for expert in range(tensor.shape[0]):
                tensor.read(expert, 1)  # and compares its digest
        if not is_whole(str(path)):
            raise ValueError(
                f"FILE names {path}, whose bytes are not what was saved; give an older checkpoint."
            )
        facts["checked"] = zipfile.is_zipfile(path)  # others have no check sums
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
    options = _options(state) if layers and is_checkpoint else {}
    if options.keys() & our_defaults().keys():
        facts["options"] = {
            flag_of(key): plain(options[key])
            for key, default in our_defaults().items()
            if key in options and plain(options[key]) not in (None, default)
        }
    if log is not None:
        _add_loads(facts, layers, Path(log))
    facts["tensors"] = _grouped(weights)
    return facts


def _options(state: dict[str, Any]) -> Facts:
    """Return the model's options, or those of the pretrained one that it is built around."""
    options = model_options(state)
    around = options.get("w2v_args")
    return around.get("model", options) if isinstance(around, dict) else options


def _tensors(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of nested dictionaries and lists, each of them once."""
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
            total += tensor.nbytes if isinstance(tensor, Tensor) else tensor.stored_bytes
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
        **_packing(own),
        "bytes": _bytes(stacks.values()),
        "beside": {
            key.removeprefix(rest): list(tensor.shape)
            for key, tensor in weights.items()
            if key.startswith(rest) and not key.startswith(prefix)
        },
    }


def _packing(stacks: Mapping[str, Any]) -> Facts:
    """Return what experts are stored in where that is not their dtype, and how far it moved them."""
    packed = {n: t for n, t in stacks.items() if isinstance(t, ShardedTensor) and t.packing}
    if not packed:
        return {}
    return {
        "stored": ", ".join(sorted({tensor.packing for tensor in packed.values()})),
        "relative_error": {name: tensor.error[0] for name, tensor in packed.items()},
        "worst_row_error": {name: tensor.error[1] for name, tensor in packed.items()},
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


def _described_shards(tensors: Iterable[ShardedTensor]) -> Facts:
    """Return the folders of shard files, how many files there are, and their bytes, by their headers."""
    keys: dict[Path, set[str]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            keys.setdefault(tensor.root / tensor.folder / piece.file, set()).add(piece.key)
    from safetensors import SafetensorError, safe_open  # takes its time, and few need it

    for path, wanted in keys.items():
        try:
            with safe_open(path, framework="pt") as file:
                whole = wanted <= set(file.keys())
        except (OSError, SafetensorError):
            whole = False
        if not whole:
            raise ValueError(
                f"FILE keeps experts in {path}, which is torn; give an older checkpoint, or put the "
                "folder back that stood beside this one."
            )
    return {
        "folders": sorted({str(path.parent) for path in keys}),
        "files": len(keys),
        "bytes": sum(path.stat().st_size for path in keys),
    }


def _lines(facts: Facts, with_tensors: bool) -> list[str]:
    """Return the facts as text; `with_tensors` also those of a file of ours, as of others always."""
    lines = [f"{facts['file']}: {facts['kind']}, {_size(facts['bytes_of_file'])}"]
    names = [f"{part} {name}" for part, name in facts.get("names", {}).items()]
    lines += [", ".join(names)] if names else []
    if facts.get("updates") is not None:
        lines.append(f"{facts['updates']} updates, {_epoch(facts)}")
    lines.append(", ".join(f"{name} {_size(count)}" for name, count in facts["bytes"].items()))
    if "shards" in facts:
        shards = facts["shards"]
        where = ", ".join(shards["folders"])
        lines.append(
            f"sharded: experts in {shards['files']} files, {_size(shards['bytes'])}, of {where}"
        )
    if "checked" in facts:
        lines.append(
            "checked: every byte is what was saved"
            if facts["checked"]
            else "not checked: a file from before torch 1.6 has no check sums"
        )
    if "options" in facts:
        options = [f"{flag} {value}" for flag, value in facts["options"].items()]
        lines.append(f"options other than the defaults: {', '.join(options) or 'none'}")
    if "layers" in facts:
        lines += ["", *_table_of_layers(facts["layers"])]
    if with_tensors or facts["kind"] != OURS:
        lines += ["", *_table_of_tensors(facts["tensors"])]
    return lines


def _epoch(facts: Facts) -> str:
    """Say where in the data the file is: at an epoch's end fairseq saves the next one's number."""
    epoch, batches = facts["epoch"], facts["batches_in_epoch"]
    if epoch is not None and batches == 0:
        return f"{epoch - 1} epochs done"
    return f"in epoch {'unknown' if epoch is None else epoch}"


def _table_of_layers(layers: Sequence[Facts]) -> list[str]:
    has_load = "load" in layers[0]
    header = ["layer", "experts", "one expert", "dtype", "size", "beside the experts"]
    rows = [header + ["load: least, most, below 0.1"] * has_load]
    for layer in layers:
        row = [
            layer["layer"],
            str(layer["experts"]),
            " ".join(f"{name} {_shape(shape)}" for name, shape in layer["shapes"].items()),
            _stored(layer),
            _size(layer["bytes"]),
            " ".join(f"{name} {_shape(shape)}" for name, shape in layer["beside"].items()) or "-",
        ]
        if has_load:
            load = layer["load"]
            row.append(f"{min(load):.2f}, {max(load):.2f}, {sum(x < 0.1 for x in load)}")
        rows.append(row)
    return _aligned(rows)


def _stored(layer: Facts) -> str:
    if "stored" not in layer:
        return layer["dtype"]
    relative, worst = (max(layer[key].values()) for key in ("relative_error", "worst_row_error"))
    return f"{layer['dtype']} in {layer['stored']}: error {relative:.1e}, worst row {worst:.1e}"


def _table_of_tensors(tensors: Sequence[Facts]) -> list[str]:
    rows = [["tensor", "number", "shape", "dtype"]]
    rows += [[t["name"], str(t["number"]), _shape(t["shape"]), t["dtype"]] for t in tensors]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _size(count: float) -> str:
    """Return bytes in the unit in which they are from 1 to 1024."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{1 if unit else 0}f} {UNITS[unit]}"
