"""convert sharded, convert full: one checkpoint from one form into the other; weights stay what they are.

A run reads either by itself; this is for files that are kept, sent or opened by others, and for small
machines: --expert-dtype stores the experts' matrices in fewer bits, int8 and int4 with a scale for each
row. How far that moved the weights is in the file (`inspect` says it); the optimizer's state stays.
While it runs, `convert full` of a sharded checkpoint needs free disk space for about twice its output.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.files import TEMPORARY
from fairseq_tutel.checkpoint.quantized import PACKINGS, Packed, RoundingError, packed_form
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, unbind, write_pieces
from fairseq_tutel.ranks.groups import Slice
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.reading import load_lazily, not_written, write

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
    errors = to_sharded(load_lazily(source, "--input"), target, arguments.expert_dtype or "")
    for name, (relative, worst) in errors.items():
        print(f"{name}: relative error {relative:.2e}, of the worst row {worst:.2e}")
    print(f"wrote {target}")


def _convert_full(arguments: argparse.Namespace, source: Path, target: Path) -> None:
    state = load_lazily(source, "--input")
    try:
        unbind(state, lambda tensor: _in_a_file(tensor, target.parent))
    except OSError as error:
        raise not_written(target, error) from error
    write(state, target)
    print(f"wrote {target}")


def _in_a_file(sharded: ShardedTensor, folder: Path) -> Tensor:
    """Return a stack in a nameless file of the folder: torch.save needs all tensors at once.

    Raises:
        OSError: there is no room.
        ValueError: a shard is missing, torn or not what was saved.
    """
    count = math.prod(sharded.shape)
    if count == 0:
        return sharded.whole()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=TEMPORARY) as file:
        os.posix_fallocate(
            file.fileno(), 0, count * sharded.dtype.itemsize
        )  # or a write would crash
        stack = torch.from_file(file.name, shared=True, size=count, dtype=sharded.dtype)
    stack = stack.view(sharded.shape)
    for expert in range(len(stack)):
        sharded.read_into(stack[expert], expert)
    return stack


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
            if isinstance(value, Tensor | ShardedTensor) and tuple(value.shape) in shapes:
                yield f"optimizer.{index}", key, entry, key


def _write_layer(
    layer: str, stacks: Found, folder: Path, root: Path, packing: str
) -> list[ShardedTensor]:
    """Write the stacks of a layer into one file, of which one expert's tensor is in memory at a time."""
    file, made, getters = f"{layer}.safetensors", [], {}
    for _, name, holder, key in stacks:
        stack: Tensor | ShardedTensor = holder[key]
        form = packed_form(packing, tuple(stack.shape[1:]), stack.dtype)
        form = form if layer.endswith(EXPERTS) else None
        pieces, error = [f"{expert}.{name}" for expert in range(stack.shape[0])], RoundingError()
        tensor = ShardedTensor(
            root=root,
            folder=folder.name,
            shape=tuple(stack.shape),
            dtype=stack.dtype,
            slicing=Slice(),
            pieces=tuple(Piece(file, piece, "") for piece in pieces),
            packing=packing if form else "",
        )
        for expert, piece in enumerate(pieces):
            getters[piece] = partial(_piece, stack, expert, form, error, key)
        made.append((tensor, error))
    layout = {piece.key: tensor.stored for tensor, _ in made for piece in tensor.pieces}
    digests = {}

    def value(piece: str) -> Tensor:
        found = getters[piece]()
        digests[piece] = digest(found)
        return found

    write_pieces(layout, value, folder / file)
    return [
        dataclasses.replace(
            tensor,
            pieces=tuple(dataclasses.replace(p, digest=digests[p.key]) for p in tensor.pieces),
            error=(error.relative, error.worst_row),
        )
        for tensor, error in made
    ]


def _piece(
    stack: Tensor | ShardedTensor, expert: int, form: Packed | None, error: RoundingError, key: str
) -> Tensor:
    own = stack[expert] if isinstance(stack, Tensor) else stack.read(expert, 1)[0]
    return _stored(own, form, error, f"expert {expert} of {key}")


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
