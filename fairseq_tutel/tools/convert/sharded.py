"""convert sharded, convert full: one checkpoint from one form into the other; weights stay what they are.

A run reads either by itself; this is for files that are kept, sent or opened by others.
"""

import argparse
import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_file
from fairseq_tutel.ranks.groups import Slice
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.tools.convert.files import load, not_written, write

# Layer, tensor name, and the dictionary and key that hold it.
Found = list[tuple[str, str, dict, Any]]


def add_to(kinds: Any) -> None:
    """Add both conversions to the command line."""
    for name, text, action in (
        ("sharded", "experts into files of their own, beside the checkpoint", to_sharded),
        ("full", "everything into one file", write),
    ):
        convert = functools.partial(_convert, action)
        add_conversion(kinds, name, convert, text, __doc__, "a checkpoint")


def _convert(
    action: Callable[[dict[str, Any], Path], None],
    arguments: argparse.Namespace,
    source: Path,
    target: Path,
) -> None:
    action(load(source, "--input"), target)
    print(f"wrote {target}")


def to_sharded(state: dict[str, Any], target: Path) -> None:
    """Write a checkpoint whose experts, and optimizer state of their shapes, are in shard files beside it.

    Raises:
        ValueError: it has no experts, or there is no room.
    """
    found = list(_stacks(state))
    if not found:
        raise ValueError("--input names a checkpoint without experts, which has nothing to shard.")
    experts = target.parent / folders.PARENT
    before, committed = set(experts.glob("*")), None
    try:
        committed, pieces = _write_shards(found, target)
        for (_, _, holder, key), each in zip(found, pieces, strict=True):
            holder[key] = ShardedTensor(
                root=target.parent,
                folder=committed,
                shape=tuple(holder[key].shape),
                dtype=holder[key].dtype,
                slicing=Slice(),
                pieces=tuple(each),
            ).record()
        write(state, target)
    except BaseException:  # Ctrl-C too: what no file names is nobody's
        if committed is not None and target.parent / committed not in before:
            shutil.rmtree(target.parent / committed, ignore_errors=True)
        with contextlib.suppress(OSError):
            experts.rmdir()  # unless others' are in it
        raise


def _write_shards(found: Found, target: Path) -> tuple[str, list[list[Piece]]]:
    """Write all stacks; return the folder that was committed, and the pieces of each.

    Raises:
        ValueError: there is no room.
    """
    folder = None
    try:
        folder = folders.begin(target.parent, "convert")
        pieces = [
            _write_stack(layer, name, holder[key], folder) for layer, name, holder, key in found
        ]
        names = [f"{p.file} {p.key} {p.digest}" for each in pieces for p in each]
        return folders.commit(folder, names), pieces
    except OSError as error:
        raise not_written(target, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # it has another name by now, or failed


def _stacks(state: dict[str, Any]) -> Iterator[tuple[str, str, dict, Any]]:
    """Yield everything to shard."""
    shapes = set()
    for key, value in state["model"].items():
        layer, _, name = key.rpartition(".")
        if layer.endswith(".experts"):
            shapes.add(tuple(value.shape))
            yield layer, name, state["model"], key
    # The file does not say which parameter a state is of, but experts' have the experts' shapes.
    for index, entry in (state.get("last_optimizer_state") or {}).get("state", {}).items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor) and tuple(value.shape) in shapes:
                yield f"optimizer.{index}", key, entry, key


def _write_stack(layer: str, name: str, tensor: Tensor, folder: Path) -> list[Piece]:
    file = f"{layer}.{name}.safetensors"
    values = {f"{expert}.{name}": tensor[expert].contiguous() for expert in range(len(tensor))}
    write_file(values, folder / file)
    return [Piece(file, key, digest(value)) for key, value in values.items()]
