"""Reusable memory buffers for offloaded experts, each for the tensors of one expert."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.quantized import Quantized
from fairseq_tutel.kernels.quantized import QuantizedMatrix

ALIGNMENT = 64  # In bytes; torch aligns CPU tensors in the same way.
# The stored dtype and shape of an expert's tensor, and the tensor's quantization format.
Stored = tuple[torch.dtype, tuple[int, ...], Quantized | None]


class _Field(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    quantized: Quantized | None
    begin: int
    end: int


@dataclass(frozen=True)
class BufferLayout:
    """The positions of an expert's tensors in a buffer."""

    fields: tuple[_Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Stored]) -> "BufferLayout":
        """Return the layout of a buffer for the given tensors."""
        fields: list[_Field] = []
        begin = 0
        for name, (dtype, shape, quantized) in tensors.items():
            end = begin + math.prod(shape) * dtype.itemsize
            fields.append(_Field(name, dtype, shape, quantized, begin, end))
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), begin)


class Buffer:
    """The memory of one expert, with all its bytes in `memory`, and views by name in `tensors`."""

    def __init__(self, layout: BufferLayout, memory: Tensor) -> None:
        self.layout, self.memory = layout, memory
        self.tensors = {f.name: memory[f.begin : f.end].view(f.dtype).view(f.shape) for f in layout.fields}
        self._quantized = {f.name: f.quantized for f in layout.fields}
        # After this CUDA event, no queued kernel reads the buffer, so the buffer may be overwritten.
        self.freed: torch.cuda.Event | None = None

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the buffer's expert in `dtype`, dequantized if necessary.

        If the stored dtype is `dtype`, the returned tensor is a view of the buffer.
        """
        quantized, stored = self._quantized[name], self.tensors[name]
        return (stored if quantized is None else quantized.dequantize(stored)).to(dtype)

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor | QuantizedMatrix:
        """Return a quantized matrix for products in `dtype` or, if impossible, a dequantized tensor."""
        quantized = self._quantized[name]
        matrix = None if quantized is None else quantized.matrix(self.tensors[name], dtype)
        return self.tensor(name, dtype) if matrix is None else matrix

    def note_free(self) -> None:
        """Mark the buffer as free after all work that is queued on the current CUDA stream."""
        if self.memory.is_cuda:
            self.freed = torch.cuda.current_stream(self.memory.device).record_event()

    @cached_property
    def bytes(self) -> dict[str, memoryview]:
        """The host memory of each tensor as bytes, into which shard files are read."""
        whole = memoryview(self.memory.numpy().data)
        return {f.name: whole[f.begin : f.end] for f in self.layout.fields}


def buffers_on_host(layout: BufferLayout, count: int) -> list[Buffer]:
    """Return `count` buffers in host memory, which is pinned if there is a GPU.

    Several buffers share an allocation, because torch rounds pinned allocations up to a power of two.
    """
    buffers: list[Buffer] = []
    with torch.inference_mode(False):
        while len(buffers) < count:
            left = (count - len(buffers)) * layout.num_bytes
            together = max(1, 2 ** (left.bit_length() - 1) // layout.num_bytes)
            size, pinned = together * layout.num_bytes, torch.cuda.is_available()
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            buffers += [Buffer(layout, part) for part in memory.split(layout.num_bytes)]
    return buffers
