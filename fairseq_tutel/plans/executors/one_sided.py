"""A plan in shared memory: a put is a copy into another rank's region, a signal a number that rises.

C chunks of a shard. Calls are cut into slices of every chunk, each the plan run once: so a region
stays small, and in the processor's caches. An element belongs to the same chunk in any slice, so that
sums have one order, whatever the size. What a rank does in a slice is a list for each lane (`plan_steps`),
made once for a size. Lanes take turns: one that would wait lets another go on.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.executors.layout import Layout, Sizes, walk
from fairseq_tutel.plans.executors.one_sided_steps import (
    COPY,
    PACK,
    PEND,
    POST,
    REDUCE,
    SIGNAL,
    UNPACK,
    WAIT,
    Program,
    Step,
    Steps,
    View,
)
from fairseq_tutel.plans.executors.shared_memory import (
    Backoff,
    Channel,
    are_there,
    cells,
    meet,
    pack,
    unpack,
)
from fairseq_tutel.plans.executors.two_sided import add_up
from fairseq_tutel.plans.format import Plan

# Bytes of a slot: at first, how many times as many when more are needed, and at most.
# 64 MiB take 4 ranks on 2 cores 1.4 to 1.6 times as long in slots of 256 KiB as of 1 MiB.
FIRST_BYTES, GROWTH, MOST_BYTES = 1 << 14, 4, 1 << 20
# Bytes of `tmp`, once, and of `staged`, where that leaves slots of so many.
TMP_BYTES, LEAST_BYTES = 1 << 22, 1 << 12
MOST_SIZES = 64  # for which a plan stays compiled
FLAGS = 1 << 32
# Others are moved as integers of their width.
OF_NUMPY = (
    *(torch.float32, torch.float64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8),
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = np.ndarray[Any, Any]


class Slice(NamedTuple):
    """A slice of a call.

    Attributes:
        offset: from the first slice, in elements of each chunk.
        steps: what this rank does.
        regions: by parity, when it first comes, the views that are not the caller's, for numpy and for
            torch.
        callers: the others.
    """

    offset: int
    steps: Steps
    regions: dict[int, tuple[list[Array], list[Tensor | None]]]
    callers: list[View]


class Compiled(NamedTuple):
    """A call of one size: its slices, and how many elements of the caller's it needs."""

    slices: list[Slice]
    elements: dict[str, int]


class Done:
    """A call that is over, as a `dist.Work` is."""

    def is_completed(self) -> bool:
        """Whether `wait` would not wait for another rank."""
        return True

    def wait(self) -> None:
        """Do nothing."""


class OneSided:
    """A plan ready to be run by one rank in shared memory. To make it is collective, as every call is.

    Args:
        plan: of the group's number of ranks; the checker lets it pass.
        group: None for all ranks; they are on one host.

    Raises:
        SharedMemoryError: there is no memory that they can share; the same on all ranks.
        CommunicationError: a rank did not come.
    """

    name = "shared memory"

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.rank = plan, dist.get_rank(group)
        self.walked = walk(plan)
        self._program = Program(self.walked, self.rank)
        slots = max(1, plan.temporary, self._program.staged)
        slot = max(LEAST_BYTES, min(MOST_BYTES, TMP_BYTES // slots // 64 * 64))
        self._slot = min(FIRST_BYTES, slot)
        # Packets do not move: where their flags are there never was anything else.
        self._most = self._slot if self._program.packets else slot
        channels = len(plan.channels)
        self.memory = meet(group, channels, self._bytes(self._most), self._bytes(self._slot))
        self._channels = [Channel(self.memory, number) for number in range(channels)]
        self._posted: dict[int, int] = defaultdict(int)
        self._calls = 0
        self._for_sizes = lru_cache(MOST_SIZES)(self._compiled)

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Done:
        """Run the plan, which is over then.

        Args:
            own: `in`, contiguous, elements along its first dimension; not written.
            out: likewise, another one.
            sizes: elements of a shard, or of every block of an all_to_all; the same on all ranks.

        Raises:
            DistBackendError: a rank has ended, or did not come within the time-out of groups.
            ValueError: tensors do not fit the sizes.
        """
        shape = own.shape if own.dim() > 1 else out.shape
        width = shape[1:].numel() if len(shape) > 1 else 1
        needed = self._longest(sizes) * width * own.element_size()
        if self._slot < min(needed, self._most):
            self._grow(needed)
        compiled = self._for_sizes(sizes, width, own.dtype)
        flat = {"in": _flat(own), "out": _flat(out)}
        for buffer, elements in compiled.elements.items():
            if flat[buffer].numel() != elements:
                raise ValueError(
                    f"{self.plan.name} needs {elements} elements of `{buffer}` for sizes of {sizes}, and "
                    f"has {flat[buffer].numel()}."
                )
        moved = {buffer: _for_numpy(tensor) for buffer, tensor in flat.items()}
        for each in compiled.slices:
            self._run(each, flat, moved)
        return Done()

    def sent(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, int]:
        """Return the bytes that a call puts to each rank; packets are twice their data."""
        total: dict[int, int] = defaultdict(int)
        for each in self._compiled(sizes, 1, dtype).slices:
            for rank, elements in each.steps.sent.items():
                total[rank] += elements * dtype.itemsize
        return dict(total)

    def _longest(self, sizes: Sizes) -> int:
        """Return the elements of the longest chunk of all ranks, which so take as many slices."""
        longest = sizes if isinstance(sizes, int) else max(map(max, sizes))
        return -(-longest // self.plan.chunks)

    def _run(self, each: Slice, flat: dict[str, Tensor], moved: dict[str, Array]) -> None:
        self._calls += 1
        steps = each.steps
        parity = self._calls % 2
        if parity not in each.regions:
            each.regions[parity] = self._region(steps, parity, flat["in"].dtype)
        inner_arrays, inner_tensors = each.regions[parity]
        arrays, tensors = inner_arrays.copy(), inner_tensors.copy()
        for number, (buffer, _, start, length) in enumerate(each.callers, len(arrays)):
            first = start + each.offset
            whole = length == moved[buffer].size
            arrays.append(moved[buffer] if whole else moved[buffer][first : first + length])
            tensor = None
            if number in steps.summed:
                tensor = flat[buffer] if whole else flat[buffer][first : first + length]
            tensors.append(tensor)
        lanes, at = steps.lanes, [0] * len(steps.lanes)
        left = [lane for lane, its in enumerate(lanes) if its]
        backoff = None
        while left:
            before = at.copy()
            for lane in left:
                at[lane] = self._advance(lanes[lane], at[lane], arrays, tensors)
            left = [lane for lane in left if at[lane] < len(lanes[lane])]
            if left and at == before:
                backoff = backoff or Backoff(self.memory)
                backoff.pause(self._awaited(lanes[lane][at[lane]] for lane in left))
            else:
                backoff = None
        if steps.last:
            self._advance(steps.last, 0, arrays, tensors)

    def _awaited(self, steps: Iterable[Step]) -> Iterator[int]:
        return (self.plan.channels[step[3]].source for step in steps if step[0] != PEND)

    def _advance(self, steps: list[Step], at: int, arrays: list[Array], tensors: list[Any]) -> int:
        """Take steps until one would wait; return which, or how many there are."""
        channels = self._channels
        for code, target, source, channel in steps[at:] if at else steps:
            if code == COPY:
                arrays[target][...] = arrays[source]
            elif code == SIGNAL:
                channels[channel].signal()
            elif code == WAIT:
                if not channels[channel].poll():
                    return at
            elif code == REDUCE:
                add_up([tensors[each] for each in source], tensors[target])
            elif code == PACK:
                pack(arrays[target], arrays[source].view(np.uint8), self._calls % FLAGS)
            elif code == UNPACK:
                if not are_there(arrays[source], self._calls % FLAGS):
                    return at
                unpack(arrays[source], arrays[target].view(np.uint8))
            elif code == POST:
                self._posted[target] += 1
            elif self._posted[source]:
                self._posted[source] -= 1
            else:
                return at
            at += 1
        return at

    # How memory is laid out: slots of `tmp`, twice; of `staged`; and packets, twice.

    def _first_slot(self, buffer: str, parity: int) -> int:
        temporary, staged = 2 * self.plan.temporary, self._program.staged
        if buffer == "tmp":
            return parity * self.plan.temporary
        return (
            temporary
            if buffer == "staged"
            else temporary + staged + 2 * parity * self._program.packets
        )

    def _bytes(self, slot: int) -> int:
        """Return what a region needs."""
        return slot * (self._first_slot("packets", 0) + 4 * self._program.packets)

    def _grow(self, needed: int) -> None:
        slots = [self._slot]
        while slots[-1] < min(needed, self._most):
            slots.append(min(GROWTH * slots[-1], self._most))
        while len(slots) > 1 and not self.memory.grow(self._bytes(slots[-1])):
            slots.pop()
            self._most = slots[-1]  # smaller slices do as well
        self._slot = slots[-1]
        self._for_sizes.cache_clear()

    def _array(self, view: View, parity: int, dtype: torch.dtype) -> Array:
        region = self.memory.region(view.rank)
        first = self._first_slot(view.buffer, parity) * self._slot
        if view.buffer == "packets":
            first += 2 * view.start * self._slot
            return cells(region, first, view.length * dtype.itemsize)
        first += view.start * dtype.itemsize
        return region[first : first + view.length * dtype.itemsize].view(_type_of_numpy(dtype))

    def _compiled(self, sizes: Sizes, width: int, dtype: torch.dtype) -> Compiled:
        layout = Layout(self.walked, sizes)
        lengths = {kind: layout.length(kind) * width for kind in self._program.kinds}
        starts = {
            buffer: [width * start for start in layout.starts(self.rank, buffer)]
            for buffer in ("in", "out")
        }
        longest, window = self._longest(sizes) * width, self._slot // dtype.itemsize
        made: dict[tuple[int, ...], Slice] = {}
        slices = []
        for offset in range(0, longest, window):
            cut = {kind: min(max(n - offset, 0), window) for kind, n in lengths.items()}
            key = tuple(cut.values())
            if key not in made:
                steps = self._program.steps(cut, starts, min(longest, window))
                callers = [view for view in steps.views if view.is_callers]
                made[key] = Slice(0, steps, {}, callers)
            slices.append(made[key]._replace(offset=offset))
        used = {view.buffer for each in slices for view in each.callers}
        return Compiled(slices, {buffer: starts[buffer][-1] for buffer in sorted(used)})

    def _region(
        self, steps: Steps, parity: int, dtype: torch.dtype
    ) -> tuple[list[Array], list[Tensor | None]]:
        arrays = [self._array(view, parity, dtype) for view in steps.views if not view.is_callers]
        return arrays, [
            torch.from_numpy(array).view(dtype) if number in steps.summed else None
            for number, array in enumerate(arrays)
        ]


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _for_numpy(flat: Tensor) -> Array:
    return (flat if flat.dtype in OF_NUMPY else flat.view(INTEGERS[flat.itemsize])).numpy()


@cache
def _type_of_numpy(dtype: torch.dtype) -> Any:
    return _for_numpy(torch.zeros(0, dtype=dtype)).dtype
