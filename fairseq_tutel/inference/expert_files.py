"""Read experts from shard files with `os.preadv`, without a memory mapping.

The pages of a mapping would count as memory of the process. A piece's SHA-256 is checked at the first read;
after that the file is trusted while its size and times do not change.
"""

import hashlib
import os
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, unreadable
from fairseq_tutel.files.small import open_ordinary, parse_json
from fairseq_tutel.inference.expert_buffers import Buffer, BufferLayout, buffers_on_host

MOST_OPEN = 64  # descriptors
LONGEST_HEADER = 100_000_000  # bytes, as in safetensors' own reader
AT_ONCE = 512  # buffers of a preadv, of which Linux takes 1,024

Identity = tuple[int, int, int, int]  # device, file, size, time of change
Wanted = Sequence[tuple[Piece, memoryview]]


class ShardFiles:
    """The open files of a store; one thread calls it at a time."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._identities: dict[Path, Identity] = {}
        self._spans: dict[Path, dict[str, tuple[int, int]]] = {}
        self._sound: set[tuple[Path, str]] = set()
        self._staging: dict[BufferLayout, Buffer] = {}

    def read(self, path: Path, wanted: Wanted) -> None:
        """Read pieces of a file into buffers of their sizes.

        Raises:
            ValueError: the file is missing, truncated, changed, unreadable or corrupt.
        """
        try:
            descriptor = self._descriptor(path)
            spans = self._spans[path]
            placed = sorted((*self._span(path, spans, piece, into), into) for piece, into in wanted)
            for run in _runs(placed):
                _read_whole(descriptor, [into for _, _, into in run], run[0][0])
        except (OSError, EOFError) as error:
            raise unreadable(path, _reason(error)) from error
        for piece, into in wanted:
            if (path, piece.key) not in self._sound:
                if hashlib.sha256(into).hexdigest() != piece.digest:
                    raise unreadable(path, f"its {piece.key} is not what was saved")
                self._sound.add((path, piece.key))

    def staging_of(self, layout: BufferLayout) -> Buffer:
        """Return a buffer on the host, which the next read overwrites."""
        if layout not in self._staging:
            (self._staging[layout],) = buffers_on_host(layout, 1)
        return self._staging[layout]

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        """Return an open file that has not changed since it was first opened."""
        if path not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = open_ordinary(path)
        self._open.move_to_end(path)
        descriptor = self._open[path]
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if self._identities.setdefault(path, identity) != identity:
            raise unreadable(path, "it was changed while it was in use")
        if path not in self._spans:
            self._spans[path] = _read_header(path, descriptor, status.st_size)
        return descriptor

    def _span(
        self, path: Path, spans: Mapping[str, tuple[int, int]], piece: Piece, into: memoryview
    ) -> tuple[int, int]:
        begin, end = spans.get(piece.key, (0, -1))
        if end - begin != into.nbytes:
            raise unreadable(path, f"its {piece.key} is not what was saved")
        return begin, end


class FromFiles:
    """The experts of a stack in shard files."""

    def __init__(self, files: ShardFiles, tensors: Mapping[str, ShardedTensor], first: int) -> None:
        self._files, self._tensors, self._first = files, tensors, first
        self.layout = BufferLayout.of({name: (*t.stored, t.quantized) for name, t in tensors.items()})

    def read(self, expert: int, buffer: Buffer) -> None:
        """Read an expert into a buffer; on a GPU, by way of one on the host."""
        if not buffer.memory.is_cuda:
            self._read(expert, buffer)
            return
        staging = self._files.staging_of(self.layout)
        self._read(expert, staging)
        buffer.memory.copy_(staging.memory, non_blocking=True)
        torch.cuda.current_stream(buffer.memory.device).synchronize()  # the next read reuses it

    def _read(self, expert: int, buffer: Buffer) -> None:
        by_file: dict[Path, list[tuple[Piece, memoryview]]] = {}
        for name, tensor in self._tensors.items():
            piece = tensor.pieces[self._first + expert]
            by_file.setdefault(tensor.path_of(piece), []).append((piece, buffer.bytes[name]))
        for path, wanted in by_file.items():
            self._files.read(path, wanted)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _read_header(path: Path, descriptor: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the begin and end of each tensor's bytes in a safetensors file."""
    prefix = bytearray(8)
    _read_whole(descriptor, [memoryview(prefix)], 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(LONGEST_HEADER, size - 8):
        raise EOFError("it ends before its header does")
    text = bytearray(length)
    _read_whole(descriptor, [memoryview(text)], 8)
    try:
        entries = {k: v["data_offsets"] for k, v in parse_json(text).items() if k != "__metadata__"}
        spans = {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in entries.items()}
        last = max((end for _, end in spans.values()), default=size)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(path, "its header is none of a safetensors file") from error
    if last != size:
        raise EOFError("its length is not what it was")
    return spans


def _runs(placed: Sequence[tuple[int, int, memoryview]]) -> list[list[tuple[int, int, memoryview]]]:
    """Group adjacent spans of a file, which one call reads."""
    runs: list[list[tuple[int, int, memoryview]]] = []
    for one in placed:
        if runs and runs[-1][-1][1] == one[0] and len(runs[-1]) < AT_ONCE:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _read_whole(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers with the bytes from `offset`.

    Raises:
        EOFError: the file ends before.
    """
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        count = os.preadv(descriptor, left, offset)
        if count == 0:
            raise EOFError("it is shorter than it was")
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
