"""Converts between sharded and single-file checkpoints, with one expert's tensor in memory at a time."""

import argparse
import contextlib
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.quantized import Quantized, RoundingError, quantized_form
from fairseq_tutel.checkpoint.saved import SavedModel, not_written
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, unbind, write_pieces
from fairseq_tutel.files import TEMPORARY
from fairseq_tutel.parallel.groups import Slice
from fairseq_tutel.parallel.progress import progress

EXPERTS = ".experts"
# Each entry has a layer, a tensor name, the dictionary with the stacked tensor, and the tensor's key.
Stacks = list[tuple[str, str, dict, Any]]


def run_sharded(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert sharded`."""
    saved = SavedModel.open(inputs[0], keep_shards=True)
    folder, errors = to_sharded(saved, output, arguments.expert_dtype or "")
    for line in error_lines(errors):
        print(line)
    return f" and its experts in {folder}; copy or move the file together with this folder"


def run_full(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert full`."""
    to_full(SavedModel.open(inputs[0], keep_shards=True), output)
    return ""


def to_full(saved: SavedModel, target: Path) -> None:
    """Write a sharded checkpoint as a single file with all experts.

    Raises:
        ValueError: a shard is missing or corrupt, or the file cannot be written.
    """
    try:
        unbind(saved.state, lambda tensor: _in_a_file(tensor, target.parent))
    except OSError as error:
        raise not_written(target, error) from error
    saved.write(target)


def _in_a_file(sharded: ShardedTensor, folder: Path) -> Tensor:
    """Read a sharded tensor into a tensor that is memory-mapped to an unnamed file in `folder`.

    torch.save needs all tensors at once, but memory may be too small for them.
    """
    count = math.prod(sharded.shape)
    if count == 0:
        return sharded.whole()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=TEMPORARY) as file:
        # The disk space is reserved first, because writing to a mapping on a full disk would crash.
        os.posix_fallocate(file.fileno(), 0, count * sharded.dtype.itemsize)
        stack = torch.from_file(file.name, shared=True, size=count, dtype=sharded.dtype)
    stack = stack.view(sharded.shape)
    for expert in range(len(stack)):
        sharded.read_into(stack[expert], expert, Slice(), 0)
    return stack


def to_sharded(
    saved: SavedModel, target: Path, expert_dtype: str = ""
) -> tuple[Path, dict[str, tuple[float, float]]]:
    """Write a sharded checkpoint, with the experts and their optimizer state in shard files.

    With an `expert_dtype` from EXPERT_DTYPES, the experts' matrices are quantized. The function returns the
    folder of the experts and, for each quantized weight, the relative error of the weight and of its worst
    row.

    Raises:
        ValueError: the checkpoint has no experts, or an expert cannot be quantized or written.
    """
    found = sorted(_stacks(saved.state), key=lambda stack: stack[0])  # Each layer has one shard file.
    if not found:
        raise ValueError("INPUT names a checkpoint without experts; give a checkpoint with experts.")
    experts = target.parent / folders.PARENT
    before, committed = set(experts.glob("*")), None
    errors = {}
    try:
        committed, written = _write_shards(found, target, expert_dtype)
        for (_, _, holder, key), tensor in zip(found, written, strict=True):
            holder[key] = replace(tensor, folder=committed).record()
            if tensor.expert_dtype:
                errors[key] = tensor.error
        saved.write(target)
    except BaseException:  # After an error, no checkpoint names the folder.
        if committed is not None and target.parent / committed not in before:
            shutil.rmtree(target.parent / committed, ignore_errors=True)
        with contextlib.suppress(OSError):
            experts.rmdir()  # rmdir fails if other folders remain.
        raise
    return target.parent / committed, errors


def error_lines(errors: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return one line per quantized weight, with the quantization errors that `to_sharded` returned."""
    return [
        f"{name}: relative error {relative:.2e}, worst row's error {worst:.2e}"
        for name, (relative, worst) in errors.items()
    ]


def _write_shards(found: Stacks, target: Path, expert_dtype: str) -> tuple[str, list[ShardedTensor]]:
    """Write experts to one file per layer, and return the folder and the `ShardedTensor`s."""
    folder, written = None, []
    count = sum(holder[key].shape[0] for _, _, holder, key in found)
    try:
        folder = folders.begin(target.parent, "convert")
        with progress("writing experts", count, "tensor") as advance:
            for layer, stacks in itertools.groupby(found, lambda stack: stack[0]):
                written += _write_layer(layer, list(stacks), folder, target.parent, expert_dtype, advance)
        names = [f"{p.file} {p.key} {p.digest}" for each in written for p in each.pieces]
        return folders.commit(folder, names), written
    except OSError as error:
        raise not_written(target, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # The folder exists only after an error.


def _stacks(state: dict[str, Any]) -> Iterator[tuple[str, str, dict, Any]]:
    """Yield stacked tensors [E, ...] of experts: parameters, moving averages and optimizer state."""
    shapes = set()
    for key, value in state["model"].items():
        layer, _, name = key.rpartition(".")
        if layer.endswith(EXPERTS):
            shapes.add(tuple(value.shape))
            yield layer, name, state["model"], key
    for average in ("ema", "ema_fp32_params"):  # --store-ema saves these averages.
        held = (state.get("extra_state") or {}).get(average) or {}
        for key in held:
            layer, _, name = key.rpartition(".")
            if layer.endswith(EXPERTS):
                yield f"{layer}.{average}", name, held, key
    # Optimizer state has no parameter names, so the experts' state is recognized by tensor shapes.
    for index, entry in (state.get("last_optimizer_state") or {}).get("state", {}).items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor | ShardedTensor) and tuple(value.shape) in shapes:
                yield f"optimizer.{index}", key, entry, key


def _write_layer(
    layer: str,
    stacks: Stacks,
    folder: Path,
    root: Path,
    expert_dtype: str,
    advance: Callable[[int], object],
) -> list[ShardedTensor]:
    """Write the stacked tensors of a layer to one file, with one expert's tensor in memory at a time.

    For each expert's tensor, `advance` is called with the number 1.
    """
    made: list[ShardedTensor] = []
    sources: dict[str, tuple[int, int]] = {}  # For each piece's key: (index of its stack, expert ID).
    for index, (_, name, holder, key) in enumerate(stacks):
        stack: Tensor | ShardedTensor = holder[key]
        shape, keys = tuple(stack.shape), [f"{expert}.{name}" for expert in range(stack.shape[0])]
        form = quantized_form(expert_dtype, shape[1:], stack.dtype) if layer.endswith(EXPERTS) else None
        made.append(
            ShardedTensor(
                root=root,
                folder=folder.name,
                shape=shape,
                dtype=stack.dtype,
                slicing=Slice(),
                pieces=tuple(Piece(f"{layer}.safetensors", piece, "") for piece in keys),
                expert_dtype=expert_dtype if form else "",
            )
        )
        sources |= {piece: (index, expert) for expert, piece in enumerate(keys)}
    digests: dict[str, str] = {}
    errors = [RoundingError() for _ in made]

    def value(piece: str) -> Tensor:
        index, expert = sources[piece]
        _, _, holder, key = stacks[index]
        name = f"expert {expert} of {key}"
        found = stored_form(holder[key][expert], made[index].quantized, errors[index], name)
        digests[piece] = digest(found)
        advance(1)
        return found

    layout = {piece: made[index].stored for piece, (index, _) in sources.items()}
    write_pieces(layout, value, folder / f"{layer}.safetensors")
    return [
        replace(
            tensor,
            pieces=tuple(replace(piece, digest=digests[piece.key]) for piece in tensor.pieces),
            error=(error.relative, error.worst_row),
        )
        for tensor, error in zip(made, errors, strict=True)
    ]


def stored_form(expert: Tensor, form: Quantized | None, error: RoundingError, name: str) -> Tensor:
    """Return an expert's tensor, quantized if requested, and add the quantization error to `error`.

    Raises:
        ValueError: the tensor of an expert cannot be quantized.
    """
    if form is None:
        return expert.contiguous()
    try:
        stored = form.quantize(expert)
    except ValueError as reason:
        raise ValueError(
            f"--expert-dtype {form.expert_dtype} cannot store {name}: {reason}; remove the option."
        ) from reason
    error.add(expert, form.dequantize(stored))
    return stored
