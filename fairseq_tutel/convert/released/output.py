"""Writes safetensors files, and output folders that have temporary names until they are complete.

The weight files are named model-00001-of-0000N.safetensors. model.safetensors.index.json lists them.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from fairseq_tutel.checkpoint.atomic_save import synced
from fairseq_tutel.checkpoint.folders import sync
from fairseq_tutel.checkpoint.saved import Weights, not_written
from fairseq_tutel.checkpoint.shards import ShardedExpert, write_pieces
from fairseq_tutel.files import temporary_of
from fairseq_tutel.parallel.progress import progress

INDEX = "model.safetensors.index.json"


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, and rename the folder to `output` if no error occurs.

    An existing folder `output` is replaced only when the new folder is complete.

    Raises:
        ValueError: the folder cannot be written.
    """
    folder = Path(temporary_of(str(output)))
    try:
        folder.mkdir()
        yield folder
        sync(folder)
        older = temporary_of(str(output))
        if output.exists():
            os.rename(output, older)
        os.rename(folder, output)
        shutil.rmtree(older, ignore_errors=True)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # The temporary folder exists only after an error.


def write_weights(weights: Weights, folder: Path, limit: int) -> None:
    """Write weights to safetensors files in a folder, with an index file.

    A safetensors file has at most `limit` bytes, unless a single weight is larger.
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
    write_text(folder / INDEX, json_text({"metadata": {"total_size": total}, "weight_map": where}))


def json_text(content: object) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=2) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file, and flush the file to disk."""
    with synced(path) as file:
        file.write(text.encode())


def _shards(weights: Weights, limit: int) -> Iterator[list[str]]:
    """Split weights into groups of at most `limit` bytes, and yield each group's weight names."""
    keys: list[str] = []
    size = 0
    for key, value in weights.items():
        if keys and size + _bytes(value) > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += _bytes(value)
    yield keys


def _bytes(value: Tensor | ShardedExpert) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _value(value: Tensor | ShardedExpert) -> Tensor:
    """Return a weight as a contiguous tensor that shares its storage with no other tensor."""
    if isinstance(value, ShardedExpert):
        return value.whole()
    value = value.detach().contiguous()
    return value if value.untyped_storage().nbytes() == _bytes(value) else value.clone()
