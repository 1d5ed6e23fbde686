"""Slots: memory for one expert each, allocated once and used again; its tensors lie side by side."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.quantized import Quantized

ALIGNMENT = 64  # bytes, what torch's own CPU tensors begin at: products see what they are used to


# Dtype and shape of what is stored of an expert's tensor, and how, where that is packed.
Stored = tuple[torch.dtype, tuple[int, ...], Quantized | None]


@dataclass(frozen=True)
class Field:
    """A tensor of one expert, as it is stored: its own dtype and shape, unless it is packed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: Quantized | None
    begin: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where the tensors of an expert lie in its slot."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Stored]) -> "Layout":
        """Return the layout of tensors by name."""
        fields: list[Field] = []
        end = 0
        for name, stored in tensors.items():
            fields.append(Field(name, *stored, end))
            end = -(-fields[-1].end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), end)


class Slot:
    """Memory for one expert.

    Attributes:
        memory: all of it, as bytes.
        tensors: by name, in the memory, as they are stored.
        freed: on a GPU, after which event it may be written again.
    """

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        self.layout, self.memory = layout, memory
        self.tensors = {
            f.name: memory[f.begin : f.end].view(f.dtype).view(f.shape) for f in layout.fields
        }
        self._packed = {f.name: f.packed for f in layout.fields}
        self.freed: torch.cuda.Event | None = None

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor to compute with: in the memory itself where it is stored so."""
        packed = self._packed[name]
        stored = self.tensors[name]
        return (stored if packed is None else packed.dequantize(stored)).to(dtype)

    def note_free(self) -> None:
        """Take note that nothing that is not under way yet reads it."""
        if self.memory.is_cuda:
            self.freed = torch.cuda.current_stream(self.memory.device).record_event()

    @cached_property
    def bytes(self) -> dict[str, memoryview]:
        """The memory of each tensor on the host, to read files into."""
        whole = memoryview(self.memory.numpy().data)
        return {f.name: whole[f.begin : f.end] for f in self.layout.fields}


def slots_on_host(layout: Layout, count: int) -> list[Slot]:
    """Return slots on the host; where there is a GPU, in pinned memory, which copies need not wait for.

    torch takes pinned memory in powers of two, which for one slot may be nearly twice its size: so
    many share one.
    """
    slots: list[Slot] = []
    with torch.inference_mode(False):
        while len(slots) < count:
            left = (count - len(slots)) * layout.num_bytes
            together = max(1, 2 ** (left.bit_length() - 1) // layout.num_bytes)
            memory = torch.empty(
                together * layout.num_bytes,
                dtype=torch.uint8,
                pin_memory=torch.cuda.is_available(),
            )
            slots += [Slot(layout, part) for part in memory.split(layout.num_bytes)]
    return slots


class Slots:
    """Slots that nobody uses, by what they are for; they are never given back before the end."""

    def __init__(self) -> None:
        self._free: dict[tuple[Layout, torch.device], list[Slot]] = {}

    def take(self, layout: Layout, device: torch.device) -> Slot:
        """Return a slot that is free, a new one where there is none."""
        free = self._free.setdefault((layout, device), [])
        if free:
            return free.pop()
        with torch.inference_mode(False):  # a thread writes it, under whatever mode
            slot = Slot(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
        slot.note_free()  # what had the memory before may still be read
        return slot

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        slot.note_free()
        self._free[slot.layout, slot.memory.device].append(slot)

    def clear(self) -> None:
        """Free what is free."""
        self._free.clear()
