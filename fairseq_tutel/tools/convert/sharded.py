"""convert sharded, convert full: one checkpoint from one form into the other; weights stay what they are.

A run reads either by itself; this is for files that are kept, sent or opened by others, and for small
machines: --expert-dtype stores the experts' matrices in fewer bits, int8 and int4 with a scale for each
row. How far that moved the weights is in the file (`inspect` says it); the optimizer's state stays.
"""

import argparse
import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.packed import PACKINGS, Packed, RoundingError, packed_form
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_file
from fairseq_tutel.ranks.groups import Slice
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.tools.convert.files import load, not_written, write

EXPERTS = ".experts"
# Layer, tensor name, and the dictionary and key that hold it.
Found = list[tuple[str, str, dict, Any]]


def add_to(kinds: Any) -> None:
    """Add both conversions to the command line."""
    text = "experts into files of their own, beside the checkpoint"
    sharded = add_conversion(kinds, "sharded", _convert_sharded, text, __doc__, "a checkpoint")
    sharded.add_argument(
        "--expert-dtype",
        choices=PACKINGS,
        help="store the experts' matrices in fewer bits [as they are]",
    )
    text = "everything into one file"
    add_conversion(kinds, "full", _convert_full, text, __doc__, "a checkpoint")


def _convert_sharded(arguments: argparse.Namespace, source: Path, target: Path) -> None:
    errors = to_sharded(load(source, "--input"), target, arguments.expert_dtype or "")
    for name, (relative, worst) in errors.items():
        print(f"{name}: relative error {relative:.2e}, of the worst row {worst:.2e}")
    print(f"wrote {target}")


def _convert_full(arguments: argparse.Namespace, source: Path, target: Path) -> None:
    write(load(source, "--input"), target)
    print(f"wrote {target}")


def to_sharded(
    state: dict[str, Any], target: Path, packing: str = ""
) -> dict[str, tuple[float, float]]:
    """Write a checkpoint whose experts, and optimizer state of their shapes, are in shard files beside it.

    Args:
        state: of a checkpoint; its experts are replaced by records.
        target: the file.
        packing: of the experts' matrices, one of PACKINGS; nothing for as they are.

    Returns:
        What packing changed, by key of the model: relative, and of the worst row.

    Raises:
        ValueError: it has no experts, or some that cannot be packed, or there is no room.
    """
    found = sorted(_stacks(state), key=lambda one: one[0])  # a file a layer
    if not found:
        raise ValueError("--input names a checkpoint without experts, which has nothing to shard.")
    experts = target.parent / folders.PARENT
    before, committed = set(experts.glob("*")), None
    errors = {}
    try:
        committed, written = _write_shards(found, target, packing)
        for (_, _, holder, key), tensor in zip(found, written, strict=True):
            holder[key] = dataclasses.replace(tensor, folder=committed).record()
            if tensor.packing:
                errors[key] = tensor.error
        write(state, target)
    except BaseException:  # Ctrl-C too: what no file names is nobody's
        if committed is not None and target.parent / committed not in before:
            shutil.rmtree(target.parent / committed, ignore_errors=True)
        with contextlib.suppress(OSError):
            experts.rmdir()  # unless others' are in it
        raise
    return errors


def _write_shards(found: Found, target: Path, packing: str) -> tuple[str, list[ShardedTensor]]:
    """Write all stacks, a file a layer; return the folder that was committed, and the stacks.

    Raises:
        ValueError: there is no room.
    """
    folder, written = None, []
    try:
        folder = folders.begin(target.parent, "convert")
        for layer, stacks in itertools.groupby(found, lambda one: one[0]):
            written += _write_layer(layer, list(stacks), folder, target.parent, packing)
        names = [f"{p.file} {p.key} {p.digest}" for each in written for p in each.pieces]
        return folders.commit(folder, names), written
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
        if layer.endswith(EXPERTS):
            shapes.add(tuple(value.shape))
            yield layer, name, state["model"], key
    # The file does not say which parameter a state is of, but experts' have the experts' shapes.
    for index, entry in (state.get("last_optimizer_state") or {}).get("state", {}).items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor) and tuple(value.shape) in shapes:
                yield f"optimizer.{index}", key, entry, key


def _write_layer(
    layer: str, stacks: Found, folder: Path, root: Path, packing: str
) -> list[ShardedTensor]:
    """Write the stacks of a layer into one file, where the tensors of an expert lie side by side."""
    file, values, written = f"{layer}.safetensors", {}, []
    for _, name, holder, key in stacks:
        stack: Tensor = holder[key]
        form = packed_form(packing, tuple(stack.shape[1:]), stack.dtype)
        form = form if layer.endswith(EXPERTS) else None
        pieces, error = [], RoundingError()
        for expert in range(len(stack)):
            piece = f"{expert}.{name}"
            values[piece] = value = _stored(stack[expert], form, error, f"expert {expert} of {key}")
            pieces.append(Piece(file, piece, digest(value)))
        tensor = ShardedTensor(
            root=root,
            folder=folder.name,
            shape=tuple(stack.shape),
            dtype=stack.dtype,
            slicing=Slice(),
            pieces=tuple(pieces),
            packing=packing if form else "",
            error=(error.relative, error.worst_row),
        )
        written.append(tensor)
    write_file(values, folder / file)
    return written


def _stored(expert: Tensor, form: Packed | None, error: RoundingError, name: str) -> Tensor:
    """Return what is stored of an expert's tensor; add what that changes to `error`.

    Raises:
        ValueError: it cannot be packed.
    """
    if form is None:
        return expert.contiguous()
    try:
        stored = form.pack(expert)
    except ValueError as reason:
        raise ValueError(
            f"--expert-dtype {form.packing} cannot store {name}: {reason}; leave the option out."
        ) from reason
    error.add(expert, form.unpack(stored))
    return stored
