"""Reads and writes shard files, which hold the experts of a sharded checkpoint.

In a sharded checkpoint each tensor of a layer's experts is replaced by a record, a plain dictionary:

    {"expert_shards": 1, "folder": "experts/0123456789abcdef", "shape": [E, ...], "dtype": "float32",
     "slices": [s, dim], "pieces": [[file, key, sha256], ...]}

Piece e * s + i is slice i of expert e, along dimension `dim` of the stack. The files are safetensors. Their
folder is next to the checkpoint. E experts, s slices of an expert.

The record of a quantized tensor has version 2 and two more keys: `"packing": "int8"` and
`"error": [relative, of the worst row]`. Its experts have one piece each.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.nested import walk
from fairseq_tutel.checkpoint.quantized import EXPERT_DTYPES, Quantized, quantized_form
from fairseq_tutel.ranks.groups import Slice

VERSION = 1
QUANTIZED_VERSION = 2  # of records of quantized tensors, which older versions reject
MARK = "expert_shards"
NAME = re.compile(r"experts/[0-9a-f]{16}")
# Names of dtypes in safetensors.
FILE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MOST_OPEN = 10_000  # files; each is a mapping, of which a Linux process may have 65,530


@dataclass(frozen=True)
class Piece:
    """The location of one expert's tensor, or of a slice: file, key, and SHA-256 of the bytes."""

    file: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A stack [E, ...] of experts in shard files, which are read on demand.

    Attributes:
        root: the folder of the checkpoint.
        folder: the folder of the shards, relative to `root`.
        slicing: how experts are split into pieces.
        pieces: E * s pieces, expert by expert.
        opened: open files by path, shared by all tensors of a checkpoint.
        expert_dtype: one of EXPERT_DTYPES if the pieces are quantized, else "".
        error: quantization error: relative, and of the worst row; see `RoundingError`.
    """

    root: Path
    folder: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slice
    pieces: tuple[Piece, ...]
    opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)
    expert_dtype: str = ""
    error: tuple[float, float] = (0.0, 0.0)

    @property
    def quantized(self) -> Quantized | None:
        """The quantized format of a piece; None if it is not quantized."""
        return quantized_form(self.expert_dtype, self._piece_shape, self.dtype)

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a piece in its file."""
        form = self.quantized
        if form is None:
            return self.dtype, self._piece_shape
        return form.stored_dtype, form.stored_shape

    @property
    def stored_bytes(self) -> int:
        """Bytes of all pieces in their files."""
        dtype, shape = self.stored
        return len(self.pieces) * math.prod(shape) * dtype.itemsize

    @property
    def _piece_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.slicing.dim] //= self.slicing.count
        return tuple(shape[1:])

    def read(self, first: int, count: int, slicing: Slice | None = None, index: int = 0) -> Tensor:
        """Return experts first .. first + count - 1, or slice `index` of each, in new memory.

        Raises:
            ValueError: a file is missing or corrupt.
        """
        slicing = Slice() if slicing is None else slicing
        shape = list(self.shape)
        shape[slicing.dim] //= slicing.count
        shape[0] = count
        if count:  # compare sizes before memory is allocated by those of the record
            self._file(self.pieces[first * self.slicing.count])
        out = torch.empty(shape, dtype=self.dtype)
        for i in range(count):
            self._read_expert(out[i], first + i, slicing, index)
        return out

    def __getitem__(self, expert: int) -> Tensor:
        """Return one expert's tensor."""
        return self.read(expert, 1)[0]

    def read_into(self, out: Tensor, expert: int) -> None:
        """Write one expert's tensor into `out`."""
        self._read_expert(out, expert, Slice(), 0)

    def whole(self) -> Tensor:
        """Return the stack."""
        return self.read(0, self.shape[0])

    def check_headers(self) -> None:
        """Open the files and compare the pieces' shapes with the record.

        Raises:
            ValueError: a file is missing or corrupt.
        """
        for piece in self.pieces:
            self._file(piece)

    def path_of(self, piece: Piece) -> Path:
        """Return the file of a piece."""
        return self.root / self.folder / piece.file

    def _read_expert(self, out: Tensor, expert: int, slicing: Slice, index: int) -> None:
        s, dim = self.slicing.count, self.slicing.dim or slicing.dim
        pieces = self.pieces[expert * s : (expert + 1) * s]
        if dim == 0:
            stored, form = self._stored(pieces[0]), self.quantized
            # A temporary tensor would leave its block with malloc.
            out.copy_(stored) if form is None else form.dequantize(stored, out)
            return
        # The range may be one piece, part of one, or several.
        width, length = self.shape[dim] // s, self.shape[dim] // slicing.count
        begin = index * length
        touched = range(begin // width, (begin + length - 1) // width + 1)
        joined = torch.cat([self._open(pieces[j]) for j in touched], dim - 1)
        out.copy_(joined.narrow(dim - 1, begin - touched[0] * width, length))

    def _open(self, piece: Piece) -> Tensor:
        """Return a piece, dequantized."""
        stored, form = self._stored(piece), self.quantized
        return stored if form is None else form.dequantize(stored)

    def _stored(self, piece: Piece) -> Tensor:
        """Return the stored form of a piece, mapped from its file, and compare its digest."""
        tensor = self._file(piece).get_tensor(piece.key)
        if digest(tensor) != piece.digest:
            raise self._unlike(piece)
        return tensor

    def _file(self, piece: Piece) -> Any:
        """Open a piece's file and compare the piece's shape with the record."""
        from safetensors import SafetensorError, safe_open  # an optional dependency of the core

        path = self.path_of(piece)
        try:
            if path not in self.opened:
                if len(self.opened) >= MOST_OPEN:
                    self.opened.clear()
                self.opened[path] = safe_open(path, framework="pt")
            found = self.opened[path].get_slice(piece.key).get_shape()
        except (OSError, SafetensorError) as error:
            raise unreadable(path, str(error)) from error
        if tuple(found) != self.stored[1]:
            raise self._unlike(piece)
        return self.opened[path]

    def _unlike(self, piece: Piece) -> ValueError:
        path = self.path_of(piece)
        return unreadable(path, f"its {piece.key} is not what was saved")

    def record(self) -> dict[str, Any]:
        """Return the record that replaces the tensor in a checkpoint."""
        more = {"packing": self.expert_dtype, "error": list(self.error)} if self.expert_dtype else {}
        return {
            MARK: QUANTIZED_VERSION if more else VERSION,
            "folder": self.folder,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "slices": [self.slicing.count, self.slicing.dim],
            "pieces": [[piece.file, piece.key, piece.digest] for piece in self.pieces],
            **more,
        }


def unreadable(path: Path, reason: str) -> ValueError:
    """Return an error for experts that cannot be read from a shard file."""
    return ValueError(
        f"the checkpoint keeps experts in {path}, which is corrupt or missing ({reason}); give an older "
        "checkpoint, or put the folder back that belongs to this one."
    )


def write_file(values: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a shard file and call fsync; it is readable for the readers of its folder.

    Raises:
        OSError: it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(values, path, metadata)
    except SafetensorError as error:  # holds the message of the system
        raise OSError(str(error)) from error
    _settle(path)


def write_pieces(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], value: Callable[[str], Tensor], path: Path
) -> None:
    """Write a shard file like `write_file` with one tensor in memory at a time.

    Args:
        layout: dtype and shape of each tensor, by key.
        value: returns the tensor of a key; called once for each.
        path: the file.
    """
    # The order of safetensors, which aligns every tensor.
    order = sorted(layout, key=lambda key: (-layout[key][0].itemsize, key))
    header, end = {}, 0
    for key in order:
        dtype, shape = layout[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": FILE_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            file.write(_bytes(value(key)).numpy().data)
    _settle(path)


def _settle(path: Path) -> None:
    """Give a file the read permissions of its folder, and call fsync."""
    with contextlib.suppress(OSError):  # a file system without permissions
        path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as saved:
        os.fsync(saved.fileno())


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_record(value: Any) -> bool:
    """Whether a value of a checkpoint is a record of a sharded tensor."""
    return isinstance(value, dict) and MARK in value


def bind(state: Any, path: Path) -> None:
    """Replace the records in a checkpoint by `ShardedTensor`s, in place.

    Args:
        state: nested dictionaries from torch.load.
        path: the checkpoint's file.

    Raises:
        ValueError: a record has a newer version, or files are missing.
    """
    found: list[ShardedTensor] = []
    opened: dict[Path, Any] = {}

    def bound(record: dict[str, Any]) -> ShardedTensor:
        found.append(_of_record(record, path, opened))
        return found[-1]

    _replace(state, is_record, bound)
    for folder in sorted({tensor.folder for tensor in found}):
        _refuse_missing(path, folder, [t for t in found if t.folder == folder])


def unbind(state: Any, change: Callable[[ShardedTensor], Any] = ShardedTensor.whole) -> None:
    """Replace the sharded tensors in a checkpoint by `change(tensor)`, in place."""
    _replace(state, lambda value: isinstance(value, ShardedTensor), change)


def _replace(tree: Any, chosen: Callable[[Any], bool], change: Callable[[Any], Any]) -> None:
    for container, key, value in walk(tree):
        if chosen(value) and not isinstance(container, tuple):
            container[key] = change(value)


def _of_record(record: dict[str, Any], path: Path, opened: dict[Path, Any]) -> ShardedTensor:
    if record[MARK] not in (VERSION, QUANTIZED_VERSION):
        raise ValueError(
            f"{path} has records of experts of version {record[MARK]}, which this fairseq_tutel cannot "
            "read; install the version that saved it, or a newer one."
        )
    try:
        tensor = ShardedTensor(
            root=path.resolve().parent,
            folder=record["folder"],
            shape=tuple(record["shape"]),
            dtype=getattr(torch, record["dtype"]),
            slicing=Slice(*record["slices"]),
            pieces=tuple(Piece(*piece) for piece in record["pieces"]),
            opened=opened,
            expert_dtype=record["packing"] if record[MARK] == QUANTIZED_VERSION else "",
            error=_pair(record.get("error", (0, 0))),
        )
        sound = _is_sound(tensor)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path} has a record of experts that no fairseq_tutel wrote; do not use this file."
        )
    return tensor


def _pair(numbers: Sequence[float]) -> tuple[float, float]:
    first, second = numbers
    return float(first), float(second)


def _is_sound(tensor: ShardedTensor) -> bool:
    """Whether an untrusted record is consistent and names only files in its folder."""
    shape, (count, dim) = tensor.shape, (tensor.slicing.count, tensor.slicing.dim)
    return bool(
        NAME.fullmatch(tensor.folder)
        and all(Path(piece.file).name == piece.file for piece in tensor.pieces)
        and isinstance(tensor.dtype, torch.dtype)
        and all(type(size) is int and size >= 0 for size in (*shape, dim))
        and count >= 1
        and (dim > 0 or count == 1)
        and shape[dim] % count == 0
        and len(tensor.pieces) == shape[0] * count
        and (
            not tensor.expert_dtype
            or (tensor.expert_dtype in EXPERT_DTYPES and count == 1 and tensor.quantized)
        )
    )


def _refuse_missing(path: Path, folder: str, tensors: Sequence[ShardedTensor]) -> None:
    directory = path.resolve().parent / folder
    # Folders and FIFOs, which would block a reader, do not count.
    entries = os.scandir(directory) if directory.is_dir() else ()
    there = {entry.name for entry in entries if os.path.isfile(entry.path)}
    missing = sorted({piece.file for t in tensors for piece in t.pieces} - there)
    if missing:
        raise ValueError(
            f"{path} keeps its experts in {directory}, where {len(missing)} files are missing, the first "
            f"{ascii(missing[0])[1:-1][:200]}; copy or move a sharded checkpoint together with that folder."
        )
