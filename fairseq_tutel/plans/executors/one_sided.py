"""Plans in shared memory: a put copies into another rank's region, a signal raises a number.

A call is cut into slices of each chunk, and the plan runs once per slice. So regions stay small and in the
processor's caches. An element belongs to the same chunk in all slices, so the order of a sum does not
depend on the size. `one_sided_steps` makes the steps of a slice, once per size. Lanes take turns: a lane
that would wait lets the next one run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.executors.layout import Layout, Sizes, walk
from fairseq_tutel.plans.executors.one_sided_steps import (
    COPY,
    PEND,
    POST,
    REDUCE,
    SIGNAL,
    WAIT,
    Program,
    Step,
    Steps,
    View,
)
from fairseq_tutel.plans.executors.shared_memory import Backoff, Channel, rendezvous
from fairseq_tutel.plans.executors.two_sided import add_up
from fairseq_tutel.plans.format import Plan

# Bytes of a slot: at first, the factor by which it grows, and at most.
# With slots of 256 KiB instead of 1 MiB, 64 MiB take 4 ranks on 2 cores 1.4 to 1.6 times as long.
FIRST_BYTES, GROWTH, MOST_BYTES = 1 << 14, 4, 1 << 20
# Bytes of one `tmp`, and of `staged`, unless that leaves slots of fewer than LEAST_BYTES.
TMP_BYTES, LEAST_BYTES = 1 << 22, 1 << 12
MOST_SIZES = 64  # for which a plan stays compiled
# Other dtypes are moved as integers of their width.
OF_NUMPY = (
    *(torch.float32, torch.float64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8),
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = np.ndarray[Any, Any]


class Slice(NamedTuple):
    """A slice of a call.

    Attributes:
        offset: distance from the first slice, in elements of each chunk.
        steps: this rank's steps.
        regions: by parity of the call, the views of regions for numpy and for torch, made at the first use.
    """

    offset: int
    steps: Steps
    regions: dict[int, tuple[list[Array], list[Tensor | None]]]


class Call:
    """A collective that runs in its first `wait`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def is_completed(self) -> bool:
        """Return whether it has run."""
        return self._run is None

    def wait(self) -> None:
        """Run it, unless it has run."""
        if self._run is not None:
            self._run()
            self._run = None


class OneSided:
    """A plan that one rank runs in shared memory. Construction is collective, as each call is.

    Args:
        plan: a plan for the group's number of ranks that the checker has accepted.
        group: ranks of one host; None: all ranks.

    Raises:
        SharedMemoryError: the ranks cannot share memory; the same on all ranks.
        CommunicationError: a rank did not come.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.rank = plan, dist.get_rank(group)
        self.walked = walk(plan)
        self._program = Program(self.walked, self.rank)
        slots = max(1, plan.temporary, self._program.staged)
        self._most = max(LEAST_BYTES, min(MOST_BYTES, TMP_BYTES // slots // 64 * 64))
        self._slot = min(FIRST_BYTES, self._most)
        channels = len(plan.channels)
        self.memory = rendezvous(group, channels, self._bytes(self._most), self._bytes(self._slot))
        self._channels = [Channel(self.memory, number) for number in range(channels)]
        self._posted: dict[int, int] = defaultdict(int)
        self._calls = 0
        self._for_sizes = lru_cache(MOST_SIZES)(self._compiled)

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        """Return a call. Its `wait` runs the plan, and raises.

        Args:
            own: `in`, contiguous, elements along its first dimension; it is not written.
            out: `out`, likewise, another tensor.
            sizes: elements of a shard, or of each block of an all_to_all; the same on all ranks.

        Raises:
            DistBackendError: a rank has ended, or did not come within the group's timeout.
            ValueError: tensors do not fit the sizes.
        """
        return Call(lambda: self._call(own, out, sizes))

    def _call(self, own: Tensor, out: Tensor, sizes: Sizes) -> None:
        shape = own.shape if own.dim() > 1 else out.shape
        width = shape[1:].numel() if len(shape) > 1 else 1
        needed = self._longest(sizes) * width * own.element_size()
        if self._slot < min(needed, self._most):
            self._grow(needed)
        slices, needs = self._for_sizes(sizes, width, own.dtype)
        flat = {"in": _flat(own), "out": _flat(out)}
        for buffer, elements in needs.items():
            if flat[buffer].numel() != elements:
                raise ValueError(
                    f"{self.plan.name} needs {elements} elements of `{buffer}` for sizes of {sizes}, and "
                    f"has {flat[buffer].numel()}."
                )
        moved = {buffer: _for_numpy(tensor) for buffer, tensor in flat.items()}
        for each in slices:
            self._run(each, flat, moved)

    def _longest(self, sizes: Sizes) -> int:
        """Return the elements of the longest chunk of all ranks: all ranks make as many slices."""
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
        callers = steps.views[len(arrays) :]
        for number, (buffer, _, start, length) in enumerate(callers, len(arrays)):
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
        return (self.plan.channels[number].source for code, number, _ in steps if code == WAIT)

    def _advance(self, steps: list[Step], at: int, arrays: list[Array], tensors: list[Any]) -> int:
        """Take steps from `at` until one would wait; return its index, or the number of steps."""
        channels = self._channels
        for code, target, source in steps[at:] if at else steps:
            if code == COPY:
                arrays[target][...] = arrays[source]
            elif code == SIGNAL:
                channels[target].signal()
            elif code == WAIT:
                if not channels[target].poll():
                    return at
            elif code == REDUCE:
                add_up([tensors[each] for each in source], tensors[target])
            elif code == POST:
                self._posted[target] += 1
            elif code == PEND:
                if not self._posted[target]:
                    return at
                self._posted[target] -= 1
            at += 1
        return at

    # A region's slots: `tmp` of even calls, `tmp` of odd calls, `staged`.

    def _bytes(self, slot: int) -> int:
        """Return the bytes of a region."""
        return slot * (2 * self.plan.temporary + self._program.staged)

    def _array(self, view: View, parity: int, dtype: torch.dtype) -> Array:
        slots = self.plan.temporary * (parity if view.buffer == "tmp" else 2)
        first = slots * self._slot + view.start * dtype.itemsize
        region = self.memory.region(view.rank)
        return region[first : first + view.length * dtype.itemsize].view(_type_of_numpy(dtype))

    def _grow(self, needed: int) -> None:
        slots = [self._slot]
        while slots[-1] < min(needed, self._most):
            slots.append(min(GROWTH * slots[-1], self._most))
        while len(slots) > 1 and not self.memory.grow(self._bytes(slots[-1])):
            slots.pop()
            self._most = slots[-1]  # smaller slices work, too
        self._slot = slots[-1]
        self._for_sizes.cache_clear()

    def _compiled(self, sizes: Sizes, width: int, dtype: torch.dtype) -> tuple[list[Slice], dict[str, int]]:
        """Return the slices of a call, and the elements of the caller's buffers."""
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
                made[key] = Slice(0, steps, {})
            slices.append(made[key]._replace(offset=offset))
        used = {view.buffer for each in slices for view in each.steps.views if view.is_callers}
        return slices, {buffer: starts[buffer][-1] for buffer in sorted(used)}

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
