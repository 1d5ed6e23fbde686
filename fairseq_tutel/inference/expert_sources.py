"""Sources of offloaded experts: the shard files of a checkpoint, or host memory.

Shard files are read with `os.preadv`, because the pages of a memory mapping would count as memory of the
process. The SHA-256 digest of each piece (a tensor of one expert) is checked at the first read. After the
first read, a file is trusted while its size and modification time stay the same.
"""

import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, unreadable
from fairseq_tutel.files import open_ordinary, parse_json
from fairseq_tutel.inference.expert_buffers import Buffer, BufferLayout, buffers_on_host
from fairseq_tutel.moe.expert_stack import ExpertStack

LONGEST_HEADER = 100_000_000  # In bytes. The safetensors library has the same limit.


class ShardFiles:
    """Reads the shard files of an expert store. The methods are not thread-safe."""

    def __init__(self) -> None:
        # For each file: its inode, size and modification time, and the positions of its tensors.
        self._known: dict[Path, tuple[tuple[int, ...], dict[str, tuple[int, int]]]] = {}
        self._sound: set[tuple[Path, str]] = set()
        self._staging: dict[BufferLayout, Buffer] = {}

    def read(self, path: Path, piece: Piece, into: memoryview) -> None:
        """Read a piece (an expert's tensor) of a shard file into memory, and check the piece.

        Raises:
            ValueError: the shard file is missing, truncated, changed, unreadable or corrupt.
        """
        try:
            with os.fdopen(open_ordinary(path), "rb", buffering=0) as file:
                begin, end = self._spans_of(path, file.fileno()).get(piece.key, (0, -1))
                is_sound = end - begin == into.nbytes
                if is_sound:
                    _read_whole(file.fileno(), into, begin)
        except (OSError, EOFError) as error:
            raise unreadable(path, getattr(error, "strerror", "") or str(error)) from error
        if is_sound and (path, piece.key) not in self._sound:
            is_sound = hashlib.sha256(into).hexdigest() == piece.digest
        if not is_sound:
            raise unreadable(path, f"its {piece.key} is not what was saved")
        self._sound.add((path, piece.key))

    def staging_of(self, layout: BufferLayout) -> Buffer:
        """Return a host buffer for copies to a GPU; the next read overwrites the buffer."""
        if layout not in self._staging:
            (self._staging[layout],) = buffers_on_host(layout, 1)
        return self._staging[layout]

    def _spans_of(self, path: Path, descriptor: int) -> dict[str, tuple[int, int]]:
        """Return the start and end of each tensor's bytes; raise ValueError if the file has changed."""
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if path not in self._known:
            self._known[path] = identity, _read_header(path, descriptor, status.st_size)
        known, spans = self._known[path]
        if known != identity:
            raise unreadable(path, "it was changed while it was in use")
        return spans


class FromFiles:
    """A source that reads the experts of a layer from the shard files of a checkpoint."""

    def __init__(self, files: ShardFiles, tensors: Mapping[str, ShardedTensor], first: int) -> None:
        self._files, self._tensors, self._first = files, tensors, first
        self.layout = BufferLayout.of({name: (*t.stored, t.quantized) for name, t in tensors.items()})

    def read(self, expert: int, buffer: Buffer) -> None:
        """Read an expert into a buffer; if the buffer is on a GPU, read through a buffer in host memory."""
        on_host = self._files.staging_of(self.layout) if buffer.memory.is_cuda else buffer
        for name, tensor in self._tensors.items():
            piece = tensor.pieces[self._first + expert]
            self._files.read(tensor.path_of(piece), piece, on_host.bytes[name])
        if on_host is not buffer:
            buffer.memory.copy_(on_host.memory, non_blocking=True)
            torch.cuda.current_stream(buffer.memory.device).synchronize()  # on_host will be reused.


class FromHost:
    """A source that keeps all experts of a layer in host memory, one buffer per expert."""

    def __init__(self, layout: BufferLayout, count: int) -> None:
        self.layout, self.buffers = layout, buffers_on_host(layout, count)

    def read(self, expert: int, buffer: Buffer) -> None:
        """Copy an expert into a buffer; if the buffer is on a GPU, use the current CUDA stream."""
        buffer.memory.copy_(self.buffers[expert].memory, non_blocking=True)


def source_of(
    stack: ExpertStack, tensors: Mapping[str, Any], tier: str, files: ShardFiles
) -> FromFiles | FromHost:
    """Return a source of a layer's experts, for the tier `disk` or `host`.

    Raises:
        ValueError: the tensors do not fit the layer or the tier.
    """
    if stack.part.slices > 1:
        raise ValueError(
            f"an expert store needs complete experts, but {stack.part.slices} ranks share each expert; "
            f"give --moe-expert-parallel-size {stack.config.num_experts} or less."
        )
    for name in stack.names:
        _check_tensor(stack, name, tensors.get(name))
    tensors = {name: tensors[name] for name in stack.names}
    sharded = [isinstance(tensor, ShardedTensor) for tensor in tensors.values()]
    if not all(sharded) and (any(sharded) or tier == "disk"):
        raise ValueError(
            "tier (--moe-expert-tier) is disk, but these experts are not in shard files of a checkpoint; "
            "write the files with `fairseq-tutel convert sharded`, or choose host."
        )
    if all(sharded):
        on_disk = FromFiles(files, tensors, stack.first)
        if tier == "disk":
            return on_disk
        in_memory = FromHost(on_disk.layout, stack.num_local)
        for expert, buffer in enumerate(in_memory.buffers):
            on_disk.read(expert, buffer)
        return in_memory
    layout = BufferLayout.of({n: (t.dtype, tuple(t.shape[1:]), None) for n, t in tensors.items()})
    in_memory = FromHost(layout, stack.num_local)
    for name, tensor in tensors.items():
        first = stack.first if len(tensor) > stack.num_local else 0
        for expert, buffer in enumerate(in_memory.buffers):
            buffer.tensors[name].copy_(tensor[first + expert].detach())
    return in_memory


def _check_tensor(stack: ExpertStack, name: str, tensor: Any) -> None:
    own = stack.whole_shape(name)
    fit = {(number, *own) for number in (stack.config.num_experts, stack.num_local)}
    shape = None if tensor is None else tuple(tensor.shape)
    if shape not in fit:
        raise ValueError(
            f"the experts' {name} has shape {shape}, not {(stack.config.num_experts, *own)}; give the "
            "expert tensors of this layer."
        )
    if isinstance(tensor, ShardedTensor) and tensor.slicing.count > 1:
        raise ValueError(
            f"{tensor.root / tensor.folder} has {tensor.slicing.count} shards of each expert, but a store "
            "reads complete experts; convert them with `fairseq-tutel convert sharded`."
        )


def _read_header(path: Path, descriptor: int, size: int) -> dict[str, tuple[int, int]]:
    """Read the header of a safetensors file, and return the start and end of each tensor's bytes."""
    prefix = bytearray(8)
    _read_whole(descriptor, memoryview(prefix), 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(LONGEST_HEADER, size - 8):
        raise EOFError("its header is truncated")
    text = bytearray(length)
    _read_whole(descriptor, memoryview(text), 8)
    try:
        entries = {k: v["data_offsets"] for k, v in parse_json(text).items() if k != "__metadata__"}
        return {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(path, "it has no valid safetensors header") from error


def _read_whole(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill `memory` with bytes of a file from `offset` on; raise EOFError if the file is too short."""
    while memory.nbytes:
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise EOFError("it is truncated")
        memory, offset = memory[count:], offset + count
