"""convert safetensors, convert from-safetensors: the weights of a checkpoint as safetensors, and back.

A folder in the usual layout: model-00001-of-0000N.safetensors with the weights by their names in the
checkpoint, model.safetensors.index.json, which says what stands where, and options.json with what fairseq
needs beside them to build the model. Experts are stacks [E, ...] by global expert id. A weight of several
names, such as shared embeddings, is stored under the first; options.json has the others. The optimizer's
state and the place in the data stay behind: a training begins anew with what is made of the folder.
"""

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.files import temporary_of
from fairseq_tutel.checkpoint.folders import sync
from fairseq_tutel.checkpoint.shards import ShardedTensor, write_file
from fairseq_tutel.files.small import content_of, parse_json
from fairseq_tutel.moe.checks import UNITS, cache_limits, is_cache_size
from fairseq_tutel.tools.arguments import add_conversion, add_files
from fairseq_tutel.checkpoint.reading import (
    DICTIONARY,
    begun_anew,
    load_lazily,
    not_written,
    write,
)

INDEX, OPTIONS = "model.safetensors.index.json", "options.json"
SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
MARK, VERSION = "fairseq_tutel", 1
# What of a checkpoint options.json holds; a Namespace or a Dictionary is an object of its name as one key.
KEPT, NAMESPACE = ("args", "cfg", "task_state", "optimizer_history"), "argparse.Namespace"

Weights = Mapping[str, Tensor | ShardedTensor]


def add_to(kinds: Any) -> None:
    """Add both conversions to the command line."""
    text = "the weights into a folder of safetensors, with the options as JSON"
    parser = kinds.add_parser("safetensors", help=text, description=__doc__)
    add_files(parser, "a checkpoint", "the folder to write", "FOLDER")
    text = "of a file, unless a single weight is larger [5GB]"
    parser.add_argument("--max-shard-size", default="5GB", metavar="BYTES", help=text)
    parser.set_defaults(convert=_convert_to)
    text = "a checkpoint of such a folder"
    add_conversion(kinds, "from-safetensors", _convert_from, text, __doc__, "the folder")


def _convert_to(arguments: argparse.Namespace) -> None:
    size, output = arguments.max_shard_size, Path(arguments.output)
    limit = cache_limits(size)[0] if is_cache_size(size) else None
    if not limit:
        raise ValueError(
            f"--max-shard-size is {size}; give bytes with a unit, as 5GB ({', '.join(UNITS)})."
        )
    _refuse_folder(output, arguments.overwrite)
    count = to_folder(load_lazily(Path(arguments.input), "--input"), output, limit)
    print(f"wrote {output}: {count} files of weights")


def _convert_from(arguments: argparse.Namespace, source: Path, output: Path) -> None:
    write(from_folder(source), output)
    print(f"wrote {output}, a training begins anew with it")


def _refuse_folder(output: Path, overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise ValueError(f"--output is {output}; give the name of a folder in an existing one.")
    if output.is_symlink() or (output.exists() and not overwrite):
        raise ValueError(f"--output {output} exists; give another name, or add --overwrite.")
    if output.exists() and not (output / INDEX).is_file():
        raise ValueError(f"--output {output} holds no {INDEX}, and is not replaced; give another.")


def to_folder(state: dict[str, Any], output: Path, limit: int) -> int:
    """Write a checkpoint's weights, a shard after the other in memory, and its options.

    Args:
        state: of a checkpoint, whose weights may lie in files.
        output: the folder, which is there when it is whole; another one of its name is replaced.
        limit: bytes of a shard; a larger weight has one to itself.

    Returns:
        The number of shards.

    Raises:
        ValueError: there is no room, or the checkpoint holds what no JSON can.
    """
    weights, tied = _told_apart(state["model"])
    shards = list(_shards(weights, limit))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    options = _as_json({MARK: VERSION, **{key: state.get(key) for key in KEPT}, "tied": tied})
    where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    total = {"total_size": sum(map(_bytes, weights.values()))}
    folder = Path(temporary_of(str(output)))
    try:
        folder.mkdir()
        for name, keys in zip(names, shards, strict=True):
            write_file({key: _value(weights[key]) for key in keys}, folder / name, {"format": "pt"})
        (folder / OPTIONS).write_text(options)
        (folder / INDEX).write_text(_as_json({"metadata": total, "weight_map": where}))
        sync(folder)
        _put(folder, output)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it has another name by now, or failed
    return len(shards)


def _put(folder: Path, output: Path) -> None:
    """Give a folder its name; what had it is removed when the new one is there."""
    if not output.exists():
        os.rename(folder, output)
        return
    older = temporary_of(str(output))
    os.rename(output, older)
    os.rename(folder, output)
    shutil.rmtree(older, ignore_errors=True)


def _told_apart(model: Mapping[str, Any]) -> tuple[Weights, dict[str, str]]:
    """Return the weights by the first of their names, and that of each other name."""
    weights: dict[str, Tensor | ShardedTensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in model.items():
        if not isinstance(value, Tensor | ShardedTensor):
            raise ValueError(
                f"--input has a {type(value).__name__} in {key}, and safetensors hold tensors alone; give "
                "a checkpoint of weights."
            )
        if isinstance(value, Tensor) and value.numel():
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            if first.setdefault(place, key) != key:
                tied[key] = first[place]
                continue
        weights[key] = value
    return weights, tied


def _shards(weights: Weights, limit: int) -> Iterator[list[str]]:
    """Yield the names of each shard, in order."""
    keys: list[str] = []
    size = 0
    for key, value in weights.items():
        if keys and size + _bytes(value) > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += _bytes(value)
    yield keys


def _bytes(value: Tensor | ShardedTensor) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _value(value: Tensor | ShardedTensor) -> Tensor:
    """Return a weight in storage of its own, as safetensors ask for."""
    if isinstance(value, ShardedTensor):
        return value.whole()
    value = value.detach().contiguous()
    return value if value.untyped_storage().nbytes() == _bytes(value) else value.clone()


def _as_json(content: dict[str, Any]) -> str:
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
            f"--input has among its options what no JSON can hold ({error}); give a checkpoint of a "
            "fairseq training."
        ) from error


def from_folder(folder: Path) -> dict[str, Any]:
    """Return the checkpoint that a folder was made of; its weights stay in their files until they are read.

    Nothing in it is run: it is JSON and tensors.

    Raises:
        ValueError: a file is missing or torn, or not what `to_folder` writes.
    """
    options, index = _json(folder / OPTIONS), _json(folder / INDEX)
    where: Any = index.get("weight_map")
    tied: Any = options.get("tied")
    if options.get(MARK) != VERSION:
        raise ValueError(
            f"--input names {folder}, whose {OPTIONS} is not of version {VERSION}; give a folder that "
            "`convert safetensors` wrote."
        )
    if not _is_sound(where, tied) or not all(_is_options(options, key) for key in KEPT):
        raise ValueError(
            f"--input names {folder}, whose {INDEX} and {OPTIONS} do not fit each other; give a folder as "
            "`convert safetensors` wrote it."
        )
    model: dict[str, Tensor] = {}
    for name in dict.fromkeys(where.values()):
        model |= _tensors(folder / name, [key for key in where if where[key] == name])
    model = {key: model[key] for key in where}
    model |= {key: model[first] for key, first in tied.items()}
    return begun_anew({**{key: options[key] for key in KEPT}, "model": model})


def _is_sound(where: Any, tied: Any) -> bool:
    """Whether an index, which may be from elsewhere, leads to no other file and leaves no name open."""
    return (
        isinstance(where, dict)
        and isinstance(tied, dict)
        and all(isinstance(name, str) and SHARD.fullmatch(name) for name in where.values())
        and all(isinstance(first, str) and first in where for first in tied.values())
        and not where.keys() & tied.keys()
    )


def _is_options(options: dict[str, Any], key: str) -> bool:
    """Whether a part of options.json is of the kind that fairseq's own is."""
    kind = {"args": argparse.Namespace, "optimizer_history": list}.get(key, dict)
    return options.get(key, 0) is None or isinstance(options.get(key), kind)


def _json(path: Path) -> dict[str, Any]:
    def special(value: dict[str, Any]) -> Any:
        name, attributes = next(iter(value.items()), ("", None))
        if len(value) > 1 or not isinstance(attributes, dict):
            return value
        if name == NAMESPACE:
            return argparse.Namespace(**attributes)
        return _dictionary(attributes) if name == DICTIONARY else value

    if not path.is_file():
        raise ValueError(f"--input names {path.parent}, in which there is no {path.name}.")
    try:
        found = parse_json(content_of(path), object_hook=special)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ValueError(
            f"{path} cannot be read as JSON ({error}); give another folder."
        ) from error
    return found if isinstance(found, dict) else {}


def _dictionary(attributes: dict[str, Any]) -> Any:
    from fairseq.data import Dictionary  # takes seconds

    dictionary = Dictionary()
    vars(dictionary).update(attributes)
    return dictionary


def _tensors(path: Path, keys: list[str]) -> dict[str, Tensor]:
    """Return the tensors of a shard, mapped from it.

    Raises:
        ValueError: it is missing or torn, or holds others.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():  # a FIFO would be waited for
            raise SafetensorError("there is no such file")
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(keys):
                raise SafetensorError("it holds other weights than the index says")
            found = {key: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} is missing or torn ({str(error).rstrip('.')}); put the file back, or give another "
            "folder."
        ) from error
    # An empty one lies where the next begins, and torch.save takes them for one storage of two types.
    return {key: value if value.numel() else value.clone() for key, value in found.items()}
