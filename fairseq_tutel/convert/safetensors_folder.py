"""Converts a checkpoint to a folder of safetensors files, and back.

- model-00001-of-0000N.safetensors: the weights, with the same names as in the checkpoint. Experts are
  stacks [E, ...] in the order of their global IDs.
- model.safetensors.index.json: the file of each weight.
- options.json: everything else that fairseq needs to build the model.

A weight with several names, such as shared embeddings, is stored under its first name; options.json lists
the other names. Optimizer state and data position are left out.
"""

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.atomic_save import synced
from fairseq_tutel.checkpoint.files import DICTIONARY
from fairseq_tutel.checkpoint.folders import sync
from fairseq_tutel.checkpoint.saved import SavedModel, Weights, not_written
from fairseq_tutel.checkpoint.shards import ShardedExpert, ShardedTensor, write_pieces
from fairseq_tutel.convert.command import NEW_RUN, size_limit
from fairseq_tutel.files import content_of, parse_json, temporary_of
from fairseq_tutel.parallel.progress import progress
from fairseq_tutel.tools.arguments import refuse_output_folder

INDEX, OPTIONS = "model.safetensors.index.json", "options.json"
SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
MARK, VERSION = "fairseq_tutel", 1
# Entries of a checkpoint that options.json holds. A Namespace or Dictionary becomes a JSON object with one
# key, the name of its class.
KEPT, NAMESPACE = ("args", "cfg", "task_state", "optimizer_history"), "argparse.Namespace"


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert safetensors`."""
    limit = size_limit(arguments)
    refuse_output_folder(output, inputs[0], INDEX, arguments.overwrite)
    count = write(SavedModel.open(inputs[0], keep_shards=True), output, limit)
    return f": {count} file{'s' * (count > 1)} of weights"


def run_back(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert from-safetensors`."""
    read(inputs[0]).write(output)
    return NEW_RUN


def write(saved: SavedModel, output: Path, limit: int) -> int:
    """Write a checkpoint to a folder of safetensors files; return the number of these files.

    A file has at most `limit` bytes, except if a single weight is larger. One weight at a time is in
    memory.

    Raises:
        ValueError: the folder could not be written, or JSON cannot represent an option.
    """
    weights, tied = _untied(saved.weights)
    options = as_json({MARK: VERSION, **{key: saved.state.get(key) for key in KEPT}, "tied": tied})
    with new_folder(output) as folder:
        count = write_weights(weights, folder, limit)
        write_text(folder / OPTIONS, options)
    return count


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to; rename it to `output` if the block succeeds.

    An older folder is replaced only when the new folder is complete.

    Raises:
        ValueError: the folder could not be written.
    """
    folder = Path(temporary_of(str(output)))
    try:
        folder.mkdir()
        yield folder
        sync(folder)
        put(folder, output)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # exists only after an error


def write_weights(weights: Mapping[str, Any], folder: Path, limit: int) -> int:
    """Write weights to safetensors files in a folder, with an index; return the number of files.

    A file has at most `limit` bytes, except if a single weight is larger.
    """
    shards = list(_shards(weights, limit))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    total = sum(map(_bytes, weights.values()))
    with progress("writing weights", total, "B") as advance:

        def value(key: str) -> Tensor:
            advance(_bytes(weights[key]))
            return _value(weights[key])

        for name, keys in zip(names, shards, strict=True):
            layout = {key: (weights[key].dtype, tuple(weights[key].shape)) for key in keys}
            write_pieces(layout, value, folder / name, {"format": "pt"})
    write_text(folder / INDEX, as_json({"metadata": {"total_size": total}, "weight_map": where}))
    return len(shards)


def write_text(path: Path, text: str) -> None:
    """Write a text file, and flush it to disk."""
    with synced(path) as file:
        file.write(text.encode())


def put(folder: Path, output: Path) -> None:
    """Rename a folder to `output`. If `output` exists, the renamed folder replaces it."""
    if not output.exists():
        os.rename(folder, output)
        return
    older = temporary_of(str(output))
    os.rename(output, older)
    os.rename(folder, output)
    shutil.rmtree(older, ignore_errors=True)


def _untied(model: Mapping[str, Any]) -> tuple[Weights, dict[str, str]]:
    """Return all weights without duplicates, and a table from each duplicate's name to the kept name."""
    weights: Weights = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in model.items():
        if not isinstance(value, Tensor | ShardedTensor):
            raise ValueError(
                f"INPUT has a {type(value).__name__} in {key}, but safetensors files hold only tensors; "
                "give a checkpoint with only tensors as weights."
            )
        if isinstance(value, Tensor) and value.numel():
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            if first.setdefault(place, key) != key:
                tied[key] = first[place]
                continue
        weights[key] = value
    return weights, tied


def _shards(weights: Mapping[str, Any], limit: int) -> Iterator[list[str]]:
    """Split weights into groups of at most `limit` bytes, one per file; yield each group's names."""
    keys: list[str] = []
    size = 0
    for key, value in weights.items():
        if keys and size + _bytes(value) > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += _bytes(value)
    yield keys


def _bytes(value: Tensor | ShardedTensor | ShardedExpert) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _value(value: Tensor | ShardedTensor | ShardedExpert) -> Tensor:
    """Return a weight as a tensor that shares no storage, as safetensors requires."""
    if isinstance(value, ShardedTensor | ShardedExpert):
        return value.whole()
    value = value.detach().contiguous()
    return value if value.untyped_storage().nbytes() == _bytes(value) else value.clone()


def as_json(content: dict[str, Any]) -> str:
    """Return the JSON text of options; raise ValueError if JSON cannot represent them."""

    def plain(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, argparse.Namespace):
            return {NAMESPACE: vars(value)}
        if f"{kind.__module__}.{kind.__name__}" == DICTIONARY:
            return {DICTIONARY: vars(value)}
        raise TypeError(f"a {kind.__name__}")

    try:
        return json.dumps(content, indent=2, default=plain) + "\n"
    except TypeError as error:
        raise ValueError(
            f"INPUT has options that JSON cannot represent ({error}); give a checkpoint that "
            "fairseq-train saved."
        ) from error


def read(folder: Path) -> SavedModel:
    """Load a checkpoint from a folder that `write` made, without running code. Weights are memory-mapped.

    Raises:
        ValueError: a file is missing or corrupt, or `write` did not write it.
    """
    options, index = _json(folder / OPTIONS), _json(folder / INDEX)
    where: Any = index.get("weight_map")
    tied: Any = options.get("tied")
    if options.get(MARK) != VERSION or not _fit(where, tied, options):
        raise ValueError(
            f"INPUT names {folder}, whose {INDEX} and {OPTIONS} are inconsistent or of another version; "
            "give a folder that `convert safetensors` wrote."
        )
    model: dict[str, Tensor] = {}
    for name in dict.fromkeys(where.values()):
        model |= _tensors(folder / name, [key for key in where if where[key] == name])
    model = {key: model[key] for key in where}
    model |= {key: model[first] for key, first in tied.items()}
    saved = SavedModel({key: options[key] for key in KEPT})
    saved.restart(model)
    return saved


def _fit(where: Any, tied: Any, options: dict[str, Any]) -> bool:
    """Return whether an untrusted index and its options are valid. It may name only files in its folder."""
    kinds = {"args": argparse.Namespace, "optimizer_history": list}
    return (
        isinstance(where, dict)
        and isinstance(tied, dict)
        and all(isinstance(name, str) and SHARD.fullmatch(name) for name in where.values())
        and all(isinstance(first, str) and first in where for first in tied.values())
        and not where.keys() & tied.keys()
        and options.keys() >= {*KEPT}
        and all(isinstance(options[key], kinds.get(key, dict) | None) for key in KEPT)
    )


def _json(path: Path) -> dict[str, Any]:
    def special(value: dict[str, Any]) -> Any:
        name, attributes = next(iter(value.items()), ("", None))
        if len(value) > 1 or not isinstance(attributes, dict):
            return value
        if name == NAMESPACE:
            return argparse.Namespace(**attributes)
        if name != DICTIONARY:
            return value
        from fairseq.data import Dictionary  # this import takes seconds

        dictionary = Dictionary()
        vars(dictionary).update(attributes)
        return dictionary

    if not path.is_file():
        raise ValueError(f"INPUT names {path.parent}, which has no {path.name}; give another folder.")
    try:
        found = parse_json(content_of(path), object_hook=special)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); give another folder.") from error
    return found if isinstance(found, dict) else {}


def _tensors(path: Path, keys: list[str]) -> dict[str, Tensor]:
    """Return a file's tensors, memory-mapped; raise ValueError if their names differ from `keys`."""
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():  # opening a FIFO would block
            raise SafetensorError("the file does not exist")
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(keys):
                raise SafetensorError("its weights differ from the index")
            found = {key: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} is missing or corrupt ({str(error).rstrip('.')}); put the file back, or give another "
            "folder."
        ) from error
    # An empty tensor has the address of the next tensor; torch.save would treat them as a shared storage.
    return {key: value if value.numel() else value.clone() for key, value in found.items()}
