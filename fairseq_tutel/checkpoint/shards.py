"""Experts in shard files: what a checkpoint holds in place of a tensor, and how a part of it is read.

In a sharded checkpoint every tensor of a layer's experts is a record, a plain dictionary:

    {"expert_shards": 1, "folder": "experts/0123456789abcdef", "shape": [E, ...], "dtype": "float32",
     "slices": [s, dim], "pieces": [[file, key, sha256], ...]}

Piece e * s + i is slice i, along dimension `dim` of the stack, of expert e. The files are safetensors in
the folder, which stands beside the checkpoint. E experts, s slices of an expert.

Where pieces are stored in fewer bits than the tensor's dtype has (`packed`), the record is of version 2 and
says also `"packing": "int8", "error": [relative, of the worst row]`, and its experts are in one piece each.
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
from fairseq_tutel.checkpoint.quantized import PACKINGS, Packed, packed_form
from fairseq_tutel.ranks.groups import Slice

VERSION = 1
PACKED_VERSION = 2  # of records of packed tensors alone, which older readers refuse
MARK = "expert_shards"
NAME = re.compile(r"experts/[0-9a-f]{16}")
# What safetensors calls the dtypes of experts and of their optimizer's state.
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
    """One expert's tensor, or a slice of it: the file, its key there, and the SHA-256 of its bytes."""

    file: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A stack [E, ...] whose experts lie in shard files; nothing is read before it is asked for.

    Attributes:
        root: the folder of the checkpoint.
        folder: of the shards, from there.
        shape: of the stack.
        dtype: of the stack.
        slicing: how the experts are cut into pieces.
        pieces: E * s of them, expert by expert.
        opened: the files that were read, by path, which all tensors of a checkpoint share.
        packing: of the pieces, one of PACKINGS; nothing where they are as they were.
        error: what packing changed: relative, and of the worst row; see `RoundingError`.
    """

    root: Path
    folder: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slice
    pieces: tuple[Piece, ...]
    opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)
    packing: str = ""
    error: tuple[float, float] = (0.0, 0.0)

    @property
    def packed(self) -> Packed | None:
        """How a piece is stored; None as it is."""
        return packed_form(self.packing, self._piece_shape, self.dtype)

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a piece in its file."""
        packed = self.packed
        if packed is None:
            return self.dtype, self._piece_shape
        return packed.stored_dtype, packed.stored_shape

    @property
    def stored_bytes(self) -> int:
        """Of all pieces."""
        dtype, shape = self.stored
        return len(self.pieces) * math.prod(shape) * dtype.itemsize

    @property
    def _piece_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.slicing.dim] //= self.slicing.count
        return tuple(shape[1:])

    def read(self, first: int, count: int, slicing: Slice | None = None, index: int = 0) -> Tensor:
        """Return experts first .. first + count - 1, or slice `index` of each, in memory of its own.

        Raises:
            ValueError: a file is missing, torn or not what was saved.
        """
        slicing = Slice() if slicing is None else slicing
        shape = list(self.shape)
        shape[slicing.dim] //= slicing.count
        shape[0] = count
        if count:  # no memory is taken by sizes that are the record's alone
            self._file(self.pieces[first * self.slicing.count])
        out = torch.empty(shape, dtype=self.dtype)
        for i in range(count):
            self._read_expert(out[i], first + i, slicing, index)
        return out

    def read_into(self, out: Tensor, expert: int) -> None:
        """Write one expert's tensor into `out`, of its shape.

        Raises:
            ValueError: a file is missing, torn or not what was saved.
        """
        self._read_expert(out, expert, Slice(), 0)

    def whole(self) -> Tensor:
        """Return the stack.

        Raises:
            ValueError: a file is missing, torn or not what was saved.
        """
        return self.read(0, self.shape[0])

    def path_of(self, piece: Piece) -> Path:
        """Return the file of a piece."""
        return self.root / self.folder / piece.file

    def _read_expert(self, out: Tensor, expert: int, slicing: Slice, index: int) -> None:
        s, dim = self.slicing.count, self.slicing.dim or slicing.dim
        pieces = self.pieces[expert * s : (expert + 1) * s]
        if dim == 0:
            out.copy_(self._open(pieces[0]))
            return
        # The wanted range may lie in one piece, in a part of it, or in several.
        width, length = self.shape[dim] // s, self.shape[dim] // slicing.count
        begin = index * length
        touched = range(begin // width, (begin + length - 1) // width + 1)
        joined = torch.cat([self._open(pieces[j]) for j in touched], dim - 1)
        out.copy_(joined.narrow(dim - 1, begin - touched[0] * width, length))

    def _open(self, piece: Piece) -> Tensor:
        """Return a piece after a look at its digest, mapped from its file where it is as it was."""
        tensor = self._file(piece).get_tensor(piece.key)
        if digest(tensor) != piece.digest:
            raise self._unlike(piece)
        return tensor if self.packed is None else self.packed.unpack(tensor)

    def _file(self, piece: Piece) -> Any:
        """Return a piece's file, in which it has the record's shape."""
        from safetensors import SafetensorError, safe_open  # the core needs it here alone

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
        """Return what a checkpoint holds in place of the tensor."""
        packing = {"packing": self.packing, "error": list(self.error)} if self.packing else {}
        return {
            MARK: PACKED_VERSION if packing else VERSION,
            "folder": self.folder,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "slices": [self.slicing.count, self.slicing.dim],
            "pieces": [[piece.file, piece.key, piece.digest] for piece in self.pieces],
            **packing,
        }


def unreadable(path: Path, reason: str) -> ValueError:
    """Return an error that says why experts cannot be read from a file of shards, and what to do."""
    return ValueError(
        f"the checkpoint keeps experts in {path}, which is torn or missing ({reason}); give an older "
        "checkpoint, or put the folder back that stood beside this one."
    )


def write_file(
    values: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors into a file of shards, down to the disk; who may read its folder may read it.

    Raises:
        OSError: it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(values, path, metadata)
    except SafetensorError as error:  # what the system said, in its own words
        raise OSError(str(error)) from error
    _settle(path)


def write_pieces(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    value: Callable[[str], Tensor],
    path: Path,
) -> None:
    """Write a file of shards like `write_file`, of which one tensor is in memory at a time.

    Args:
        layout: dtype and shape of each tensor, by key.
        value: returns the tensor of a key; called once for each.
        path: of the file.

    Raises:
        OSError: it could not be written.
    """
    # As safetensors orders them, so that every tensor is aligned.
    order = sorted(layout, key=lambda key: (-layout[key][0].itemsize, key))
    header, end = {}, 0
    for key in order:
        dtype, shape = layout[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": FILE_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            file.write(_bytes(value(key)).numpy().data)
    _settle(path)


def _settle(path: Path) -> None:
    """Give a file its folder's readers, and wait until the disk has it."""
    with contextlib.suppress(OSError):  # a disk that knows no modes
        path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as saved:
        os.fsync(saved.fileno())


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes on the host, in hexadecimal."""
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_record(value: Any) -> bool:
    """Whether a value of a checkpoint stands for a tensor in shard files."""
    return isinstance(value, dict) and MARK in value


def bind(state: Any, path: Path) -> None:
    """Replace the records in a checkpoint by tensors that can be read, in place.

    Args:
        state: nested dictionaries, as torch.load gives them.
        path: of the checkpoint's file.

    Raises:
        ValueError: the records are of a newer version, or files are missing.
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
    """Replace the sharded tensors of a checkpoint by what `change` makes of them, in place."""
    _replace(state, lambda value: isinstance(value, ShardedTensor), change)


def _replace(tree: Any, chosen: Callable[[Any], bool], change: Callable[[Any], Any]) -> None:
    for container, key, value in walk(tree):
        if chosen(value) and not isinstance(container, tuple):
            container[key] = change(value)


def _of_record(record: dict[str, Any], path: Path, opened: dict[Path, Any]) -> ShardedTensor:
    if record[MARK] not in (VERSION, PACKED_VERSION):
        raise ValueError(
            f"{path} keeps its experts in a way (version {record[MARK]}) that this fairseq_tutel does not "
            "know; install the one that saved it, or a newer one."
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
            packing=record["packing"] if record[MARK] == PACKED_VERSION else "",
            error=_pair(record.get("error", (0, 0))),
        )
        sound = _is_sound(tensor)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path} keeps its experts in a way that no fairseq_tutel wrote; do not use it."
        )
    return tensor


def _pair(numbers: Sequence[float]) -> tuple[float, float]:
    first, second = numbers
    return float(first), float(second)


def _is_sound(tensor: ShardedTensor) -> bool:
    """Whether a record, which may be from elsewhere, leads to no other file and to no other numbers."""
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
        and (not tensor.packing or (tensor.packing in PACKINGS and count == 1 and tensor.packed))
    )


def _refuse_missing(path: Path, folder: str, tensors: Sequence[ShardedTensor]) -> None:
    directory = path.resolve().parent / folder
    # A folder or a FIFO, which a reader would wait for, is no file.
    entries = os.scandir(directory) if directory.is_dir() else ()
    there = {entry.name for entry in entries if os.path.isfile(entry.path)}
    missing = sorted({piece.file for t in tensors for piece in t.pieces} - there)
    if missing:
        raise ValueError(
            f"{path} keeps its experts in {directory}, where {len(missing)} files are missing, the first "
            f"{ascii(missing[0])[1:-1][:200]}; copy or move a sharded checkpoint together with that folder."
        )
