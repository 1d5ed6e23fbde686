"""Reads and writes shard files, which contain the experts of a sharded checkpoint.

A sharded checkpoint has a record instead of each stacked tensor of experts. A record is a dictionary:

    {"expert_shards": 1, "folder": "experts/0123456789abcdef", "shape": [E, ...], "dtype": "float32",
     "slices": [s, dim], "pieces": [[file, key, sha256], ...]}

In a record, E is the number of experts, and s the number of shards of each expert. Piece e * s + i is shard
i of expert e, where the stacked tensor is split along dimension `dim`. The shard files have the format
safetensors. The folder of the shard files is next to the checkpoint.

The value of "expert_shards" is the record's version: 1 for a tensor in its original dtype, 3 for int4 in
groups, and 2 for other quantized tensors. The record of a quantized tensor has two more entries, such as
`"packing": "int8"` and `"error": [relative error, error of the worst row]`. Quantized experts are not split
into expert shards.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.atomic_save import synced
from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.checkpoint.quantized import EXPERT_DTYPES, Quantized, quantized_form
from fairseq_tutel.parallel.groups import Slice
from fairseq_tutel.parallel.progress import progress

VERSION = 1
# Versions of the records of quantized tensors.
QUANTIZED_VERSION, GROUPS_VERSION = 2, 3
MARK = "expert_shards"
NAME = re.compile(r"experts/[0-9a-f]{16}")
# Names of torch dtypes in safetensors files.
FILE_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """The location and the SHA-256 digest of one expert's tensor, or of one shard of this tensor."""

    file: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A stacked tensor [E, ...] of experts, which is read from shard files on demand."""

    root: Path  # The folder that contains the checkpoint.
    folder: str  # The folder of the shard files, relative to `root`.
    shape: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slice  # The split of each expert into pieces (dimension and count).
    pieces: tuple[Piece, ...]  # The E * s pieces of the stacked tensor, expert by expert.
    # The shard files that are open, by path; all tensors of a checkpoint share this dict.
    opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)
    expert_dtype: str = ""  # One of EXPERT_DTYPES, or "" if not quantized.
    error: tuple[float, float] = (0.0, 0.0)  # The relative errors of the tensor and of its worst row.
    in_rows: bool = False  # True for older int4 files, with a scale per row.

    @property
    def quantized(self) -> Quantized | None:
        """The quantized format in which each expert is stored, or None if experts are not quantized."""
        return quantized_form(self.expert_dtype, self._piece_shape, self.dtype, self.in_rows)

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of one piece (an expert or an expert shard) in its file."""
        return (self.dtype, self._piece_shape) if self.quantized is None else self.quantized.stored

    @property
    def stored_bytes(self) -> int:
        """The number of bytes that the sharded tensor occupies in the shard files."""
        dtype, shape = self.stored
        return len(self.pieces) * math.prod(shape) * dtype.itemsize

    @property
    def _piece_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.slicing.dim] //= self.slicing.count
        return tuple(shape[1:])

    def read(self, first: int, count: int, slicing: Slice | None = None, index: int = 0) -> Tensor:
        """Read the tensors of `count` experts from expert `first` on; raise ValueError for bad files.

        With `slicing`, only shard `index` of each expert is read.
        """
        slicing = Slice() if slicing is None else slicing
        shape = list(self.shape)
        shape[slicing.dim] //= slicing.count
        shape[0] = count
        if count:  # `_file` checks the shape before memory is allocated.
            self._file(self.pieces[first * self.slicing.count])
        out = torch.empty(shape, dtype=self.dtype)
        for i in range(count):
            self.read_into(out[i], first + i, slicing, index)
        return out

    def __getitem__(self, expert: int) -> Tensor:
        """Return the tensor of one expert."""
        return self.read(expert, 1)[0]

    def select(self, experts: Sequence[int]) -> "ShardedTensor":
        """Return the stacked tensor of the given experts, which is read from the same shard files."""
        s = self.slicing.count
        pieces = tuple(piece for e in experts for piece in self.pieces[e * s : (e + 1) * s])
        return replace(self, shape=(len(experts), *self.shape[1:]), pieces=pieces)

    def whole(self) -> Tensor:
        """Return the complete stacked tensor [E, ...] from the shard files."""
        return self.read(0, self.shape[0])

    def check_headers(self) -> None:
        """Open the shard files; raise ValueError if a tensor's shape in a file differs from its record."""
        for piece in self.pieces:
            self._file(piece)

    def path_of(self, piece: Piece) -> Path:
        """Return the path of the shard file that contains a piece (an expert or an expert shard)."""
        return self.root / self.folder / piece.file

    def read_into(self, out: Tensor, expert: int, slicing: Slice, index: int) -> None:
        """Write shard `index` of an expert's tensor into `out`; `Slice()` and 0 select the whole tensor."""
        s, dim = self.slicing.count, self.slicing.dim or slicing.dim
        pieces = self.pieces[expert * s : (expert + 1) * s]
        if dim == 0:
            self._read_piece(pieces[0], out)
            return
        # The requested range of a tensor may be a piece, a part of a piece, or several pieces.
        width, length = self.shape[dim] // s, self.shape[dim] // slicing.count
        begin = index * length
        touched = range(begin // width, (begin + length - 1) // width + 1)
        joined = torch.cat([self._read_piece(pieces[j]) for j in touched], dim - 1)
        out.copy_(joined.narrow(dim - 1, begin - touched[0] * width, length))

    def _read_piece(self, piece: Piece, out: Tensor | None = None) -> Tensor:
        """Read one expert or expert shard, and dequantize it; raise ValueError for bad data."""
        stored = self._file(piece).get_tensor(piece.key)
        if digest(stored) != piece.digest:
            raise _unlike(self.path_of(piece), piece)
        if self.quantized is not None:
            return self.quantized.dequantize(stored, out)
        return stored if out is None else out.copy_(stored)

    def _file(self, piece: Piece) -> Any:
        """Open the shard file that contains a piece; raise ValueError if the piece has a wrong shape."""
        from safetensors import SafetensorError, safe_open  # safetensors is an optional dependency.

        path = self.path_of(piece)
        try:
            if path not in self.opened:
                self.opened[path] = safe_open(path, framework="pt")
            found = self.opened[path].get_slice(piece.key).get_shape()
        except (OSError, SafetensorError) as error:
            raise unreadable(path, str(error)) from error
        if tuple(found) != self.stored[1]:
            raise _unlike(path, piece)
        return self.opened[path]

    def record(self) -> dict[str, Any]:
        """Return the record that replaces this tensor in the main file of a sharded checkpoint."""
        more = {"packing": self.expert_dtype, "error": list(self.error)} if self.expert_dtype else {}
        in_groups = self.quantized is not None and self.quantized.in_groups
        return {
            MARK: GROUPS_VERSION if in_groups else QUANTIZED_VERSION if more else VERSION,
            "folder": self.folder,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "slices": [self.slicing.count, self.slicing.dim],
            "pieces": [[piece.file, piece.key, piece.digest] for piece in self.pieces],
            **more,
        }


@dataclass(frozen=True)
class ShardedExpert:
    """One expert's tensor in a stacked tensor, which is read from a shard file on demand."""

    stack: ShardedTensor
    expert: int  # The expert's global ID.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the expert's tensor after dequantization."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the expert's tensor after dequantization."""
        return self.stack.dtype

    def whole(self) -> Tensor:
        """Read and return the tensor of this expert."""
        return self.stack[self.expert]


def unreadable(path: Path, reason: str) -> ValueError:
    """Return a ValueError for experts that could not be read from a shard file."""
    return ValueError(
        f"the checkpoint keeps experts in {path}, which is corrupt or missing ({reason}); give an older "
        "checkpoint, or restore the folder that belongs to this checkpoint."
    )


def _unlike(path: Path, piece: Piece) -> ValueError:
    return unreadable(path, f"the tensor {piece.key} differs from the saved tensor")


def write_file(values: Mapping[str, Tensor], path: Path) -> None:
    """Write a dictionary of tensors to a safetensors file, and flush the file to disk."""
    layout = {key: (value.dtype, tuple(value.shape)) for key, value in values.items()}
    write_pieces(layout, values.__getitem__, path)


def write_pieces(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    value: Callable[[str], Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file, with one tensor in memory at a time, and flush the file to disk.

    `layout` has the dtype and the shape of each tensor, by key. The function `value` is called once per
    key, and returns the tensor for the key.
    """
    # As in safetensors, the widest dtypes come first, which aligns every tensor.
    order = sorted(layout, key=lambda key: (-layout[key][0].itemsize, key))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key in order:
        dtype, shape = layout[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": FILE_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with synced(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            file.write(raw_bytes(value(key)))
        with contextlib.suppress(OSError):  # Some file systems have no permissions.
            path.chmod(path.parent.stat().st_mode & 0o666)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's bytes as a hexadecimal number."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def is_record(value: Any) -> bool:
    """Return whether a value in a checkpoint is the record of a tensor in shard files."""
    return isinstance(value, dict) and MARK in value


def bind(state: Any, path: Path) -> None:
    """Replace the records of shard files in a loaded checkpoint by `ShardedTensor`s, in place.

    `path` is the checkpoint file. The function raises ValueError for a bad record or missing shard file.
    """
    found: dict[str, set[str]] = {}
    opened: dict[Path, Any] = {}
    for container, key, value in walk(state):
        if is_record(value) and not isinstance(container, tuple):
            container[key] = tensor = _of_record(value, path, opened)
            found.setdefault(tensor.folder, set()).update(piece.file for piece in tensor.pieces)
    for folder, names in sorted(found.items()):
        _refuse_missing(path, folder, names)


def unbind(state: Any, change: Callable[[ShardedTensor], Any] = ShardedTensor.whole) -> None:
    """Replace each `ShardedTensor` in a checkpoint by `change(tensor)`, in place."""
    found = [
        (container, key, value)
        for container, key, value in walk(state)
        if isinstance(value, ShardedTensor) and not isinstance(container, tuple)
    ]
    with progress("reading experts", len(found), "tensor") as advance:
        for container, key, value in found:
            container[key] = change(value)
            advance(1)


def _of_record(record: dict[str, Any], path: Path, opened: dict[Path, Any]) -> ShardedTensor:
    version = record[MARK]
    if version not in (VERSION, QUANTIZED_VERSION, GROUPS_VERSION):
        raise ValueError(
            f"{path} has expert records of version {version}, which this version of fairseq_tutel "
            "cannot read; install the version that saved the file, or a newer version."
        )
    try:
        relative, worst_row = record.get("error", (0, 0))
        tensor = ShardedTensor(
            root=path.resolve().parent,
            folder=record["folder"],
            shape=tuple(record["shape"]),
            dtype=getattr(torch, record["dtype"]),
            slicing=Slice(*record["slices"]),
            pieces=tuple(Piece(*piece) for piece in record["pieces"]),
            opened=opened,
            expert_dtype="" if version == VERSION else record["packing"],
            error=(float(relative), float(worst_row)),
            in_rows=version == QUANTIZED_VERSION,
        )
        sound = _is_sound(tensor)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path} has an expert record that fairseq_tutel did not write; do not use this file."
        )
    return tensor


def _is_sound(tensor: ShardedTensor) -> bool:
    """Return whether an untrusted record is consistent, and names only files in its folder."""
    count = tensor.slicing.count
    is_quantized = tensor.expert_dtype in EXPERT_DTYPES and count == 1 and tensor.quantized
    return bool(
        NAME.fullmatch(tensor.folder)
        and all(Path(piece.file).name == piece.file for piece in tensor.pieces)
        and isinstance(tensor.dtype, torch.dtype)
        and tensor.shape[tensor.slicing.dim] % count == 0
        and len(tensor.pieces) == tensor.shape[0] * count
        and (not tensor.expert_dtype or is_quantized)
    )


def _refuse_missing(path: Path, folder: str, names: set[str]) -> None:
    directory = path.resolve().parent / folder
    # A pipe in place of a shard file counts as missing, because reading would block.
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise ValueError(
            f"{path} keeps its experts in {directory}, where {len(missing)} files are missing, such as "
            f"{ascii(missing[0])[1:-1][:200]}; copy or move a sharded checkpoint together with that folder."
        )
