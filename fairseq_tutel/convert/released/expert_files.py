"""Writes experts to shard files in the order of the input, and continues after an interruption.

The shard files have one place for each tensor, so that the tensors can be written in any order. The input
is read file by file, with one tensor in memory at a time. A journal lists the parts of the input that are
on disk; the next run skips these.
"""

import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.quantized import RoundingError
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, layout_of, raw_bytes
from fairseq_tutel.convert.released.folder import ReleasedFolder
from fairseq_tutel.convert.released.unfinished import Unfinished
from fairseq_tutel.convert.sharded import stored_form
from fairseq_tutel.files import renamed_when_whole

Stacks = Mapping[str, ShardedTensor]


@dataclass(frozen=True)
class Target:
    """The place of an input tensor: expert `expert` in the stacked tensor `stack`."""

    stack: str  # such as decoder.layers.3.fc1.experts.fc1_weight
    expert: int  # global ID in the output

    @property
    def file(self) -> str:
        """The name of the shard file of the layer."""
        return f"{self.stack.rpartition('.')[0]}.safetensors"

    @property
    def key(self) -> str:
        """The key of the tensor in the shard file."""
        return f"{self.expert}.{self.stack.rpartition('.')[2]}"


def write_experts(
    source: ReleasedFolder, targets: Mapping[str, Target], stacks: Stacks, work: Unfinished
) -> dict[str, ShardedTensor]:
    """Write all experts of an input to shard files in the folder of `work`.

    Args:
        source: the input.
        targets: for the name of each input tensor of an expert, its place.
        stacks: for the name of each stacked tensor, its shape, dtype and format; the files and digests of
            its pieces are not yet known.
        work: the unfinished output; its journal lists the input files that an earlier run finished.

    Returns:
        The stacked tensors, which name their files.

    Raises:
        ValueError: an input tensor is missing, corrupt, of the wrong shape, or cannot be quantized.
        OSError: a file could not be written.
    """
    writing = work.folder / folders.PARENT / folders.WRITING
    # A step writes the tensors of one input file that belong to one layer.
    steps: dict[str, list[str]] = {}
    for file, names in source.shards().items():
        for name in names:
            if name in targets:
                steps.setdefault(f"{file} {targets[name].file}", []).append(name)
    if not all(step in work.journal for step in steps):
        spans = _create_files(writing, targets, stacks)
        for number, (step, names) in enumerate(steps.items(), 1):
            if step not in work.journal:
                work.record(step, _write_tensors(source, names, targets, stacks, writing, spans))
                work.log(f"{number} of {len(steps)}: {step}, {len(names)} tensors of experts")
    return _committed(targets, stacks, work, writing)


def _create_files(
    folder: Path, targets: Mapping[str, Target], stacks: Stacks
) -> dict[str, dict[str, range]]:
    """Create the shard files with space for all tensors; return the byte range of each key of each file."""
    layouts: dict[str, dict[str, Any]] = {}
    for target in targets.values():
        layouts.setdefault(target.file, {})[target.key] = stacks[target.stack].stored
    folder.mkdir(parents=True, exist_ok=True)
    spans = {}
    for file, layout in layouts.items():
        header, spans[file] = layout_of(layout)
        if not (folder / file).exists():
            with renamed_when_whole(folder / file) as new, open(new, "wb") as content:
                content.write(header)
                content.flush()
                # A full disk then raises an error now, and not hours later.
                size = max(span.stop for span in spans[file].values())
                os.posix_fallocate(content.fileno(), 0, size)
                os.fsync(content.fileno())
    for path in folder.iterdir():
        if path.name not in layouts:  # a temporary file of a run that was killed
            path.unlink()
    folders.sync(folder)
    return spans


def _write_tensors(
    source: ReleasedFolder,
    names: list[str],
    targets: Mapping[str, Target],
    stacks: Stacks,
    folder: Path,
    spans: Mapping[str, Mapping[str, range]],
) -> dict[str, list[Any]]:
    """Write tensors of experts of one layer; return the digest and the rounding error of each tensor."""
    found: dict[str, list[Any]] = {}
    path = folder / targets[names[0]].file
    with open(path, "r+b") as file:
        for name in names:
            target = targets[name]
            stored, error = _stored(source, name, stacks[target.stack])
            file.seek(spans[path.name][target.key].start)
            file.write(raw_bytes(stored))
            found[name] = [digest(stored), *astuple(error)]
        file.flush()
        os.fsync(file.fileno())
    return found


def _stored(source: ReleasedFolder, name: str, stack: ShardedTensor) -> tuple[Tensor, RoundingError]:
    """Read one tensor of an expert, and convert it to its stored form."""
    tensor, error = source.read(name), RoundingError()
    if tuple(tensor.shape) != stack.shape[1:] or not tensor.dtype.is_floating_point:
        raise ValueError(
            f"{source.flag} {source.path} has {name} of {tensor.dtype} {list(tensor.shape)}, but "
            f"config.json describes {list(stack.shape[1:])}; give a complete folder of one model."
        )
    return stored_form(tensor.to(stack.dtype), stack.quantized, error, name), error


def _committed(
    targets: Mapping[str, Target], stacks: Stacks, work: Unfinished, writing: Path
) -> dict[str, ShardedTensor]:
    """Give the folder of the shard files its final name; return the stacked tensors with their files."""
    by_stack: dict[str, dict[int, tuple[Piece, RoundingError]]] = {}
    try:
        written = {name: entry for entries in work.journal.values() for name, entry in entries.items()}
        for name, target in targets.items():
            content, *errors = written[name]
            piece = Piece(target.file, target.key, str(content)), RoundingError(*map(float, errors))
            by_stack.setdefault(target.stack, {})[target.expert] = piece
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise ValueError(
            f"{work.folder} is the place of unfinished work, but its journal has other results "
            f"({type(reason).__name__}: {reason}); remove the folder, or give another --output."
        ) from reason
    pieces = {stack: [found[e] for e in sorted(found)] for stack, found in by_stack.items()}
    names = [f"{p.file} {p.key} {p.digest}" for found in pieces.values() for p, _ in found]
    committed = f"{folders.PARENT}/{folders.name_of(names)}"
    if not (work.folder / committed).is_dir():  # else an earlier run was killed after this step
        folders.commit(writing, names)
    made = {}
    for stack, found in pieces.items():
        total = RoundingError()
        for _, error in found:
            total.merge(error)
        made[stack] = replace(
            stacks[stack],
            folder=committed,
            pieces=tuple(piece for piece, _ in found),
            error=(total.relative, total.worst_row),
        )
    return made
