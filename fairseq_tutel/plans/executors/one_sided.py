"""Executor that runs collective plans in shared memory, where ranks write to each other's regions.

A call divides each chunk into slices, and runs the plan once per slice. The memory regions are therefore
small and stay in the processor's caches. The division into chunks does not depend on the slices, so slices
do not change the order of a sum. A signal increments a counter. The steps of a slice are built once for
each data size. If a lane would have to wait, the next lane of the rank runs.

Each rank has a memory region to which other ranks write. A slot of a region holds a slice of one chunk. A
region has the slots of these buffers, in this order:

- There are two `tmp` buffers, for even and for odd calls.
- `staged` replaces `out` if a step puts to another rank's `out`. At the end, `staged` is copied to `out`.

`in` is the caller's tensor, and so is `out` unless `staged` replaces `out`. A put is a copy that finishes
at once, so a flush needs no action.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.checker.data import kind_of
from fairseq_tutel.plans.executors.layout import End, Layout, Move, Sizes, Walked, walk
from fairseq_tutel.plans.executors.shared_memory import (
    WORDS_OF_LINE,
    Backoff,
    SharedMemory,
    SharedMemoryError,
)
from fairseq_tutel.plans.executors.two_sided import add_up
from fairseq_tutel.plans.format import Place, Plan
from fairseq_tutel.plans.format import Step as PlanStep

# The initial bytes of a slot, the factor by which a slot grows, and a slot's maximum bytes. A collective of
# 64 MiB on 4 ranks and 2 cores takes 1.4 to 1.6 times as long with slots of 256 KiB as with slots of 1 MiB.
FIRST_BYTES, GROWTH, MOST_BYTES = 1 << 14, 4, 1 << 20
# Each `tmp` and `staged` has at most TMP_BYTES, unless slots would then have fewer than LEAST_BYTES.
TMP_BYTES, LEAST_BYTES = 1 << 22, 1 << 12
MOST_SIZES = 64  # A plan's steps are cached for at most this many sizes.

COPY, REDUCE, SIGNAL, WAIT, POST, PEND = range(6)
CODES = {"signal": SIGNAL, "wait": WAIT, "post": POST, "pend": PEND}
# A step is (operation code, target, sources). Targets are views, channels or semaphores. Sources are views.
Step = tuple[int, Any, Any]
# A view is a range of elements in the caller's tensors (`in`, `out`) or in shared memory (`tmp`, `staged`).
# The items of a view are the buffer, rank, first element and length. A view is a plain tuple for speed,
# because rows of varying sizes need new views in every call.
View = tuple[str, int, int, int]
# One list has the bytes of each view, and one has the tensors of summed views. Indices are view numbers.
Views = tuple[list[Any], list[Any]]


class Steps(NamedTuple):
    """The steps of a collective plan that one rank runs for one slice of the data.

    `lanes` has the steps of each lane, and `last` has the steps after all lanes. `callers` and `regions`
    are numbered views of the caller's tensors and of shared memory. `summed` has the numbers of views that
    sums use. `opened` has the memory of `regions` for even and for odd calls.
    """

    lanes: list[list[Step]]
    last: list[Step]
    callers: list[tuple[int, View]]
    regions: list[tuple[int, View]]
    summed: set[int]
    opened: dict[int, Views]


class Program:
    """One rank's steps of a collective plan, for buffers of any size.

    `staged` is the number of slots in the buffer `staged`, or 0 if there is no such buffer.
    """

    def __init__(self, walked: Walked, rank: int) -> None:
        plan = walked.plan
        is_staged = any(move.op == "put" and move.target[1].buffer == "out" for move in walked.moves)
        self.staged = plan.out_chunks if is_staged else 0

        def home(end: End) -> End:
            owner, (buffer, chunk) = end
            return owner, Place("staged" if is_staged and buffer == "out" else buffer, chunk)

        moves = {
            move.site: move._replace(sources=tuple(map(home, move.sources)), target=home(move.target))
            for move in walked.moves
            if move.site[0] == rank
        }

        def step_of(step: PlanStep, lane: int, index: int) -> Step | Move:
            number = step.semaphore if step.channel is None else step.channel
            return moves.get((rank, lane, index)) or (CODES[step.op], number, None)

        self.lanes = [
            [step_of(step, lane, index) for index, step in enumerate(steps) if step.op != "flush"]
            for lane, steps in enumerate(plan.programs[rank])
        ]
        kinds = tuple(kind_of(plan, rank, Place("out", chunk)) for chunk in range(self.staged))
        ends = (rank, Place("staged", 0)), (rank, Place("out", 0))
        self.last = Move((rank, 0, 0), "copy", ends[:1], ends[1], kinds, 0)
        self.kinds = sorted({kind for move in (*moves.values(), self.last) for kind in move.kinds})

    def steps(self, layout: Layout) -> Steps:
        """Return this rank's steps for one slice of the data, which is the window of the layout."""
        views: dict[View, int] = {}
        summed: set[int] = set()

        def steps_of(lane: Iterable[Step | Move]) -> list[Step]:
            found: list[Step] = []
            for each in lane:
                if not isinstance(each, Move):
                    found.append(each)
                    continue
                for ends, length in layout.runs(each.kinds, *each.sources, each.target):
                    numbers = [
                        views.setdefault((buffer, rank, start, length), len(views))
                        for rank, buffer, start in ends
                    ]
                    if len(numbers) == 2:
                        found.append((COPY, numbers[1], numbers[0]))
                    else:
                        found.append((REDUCE, numbers[-1], numbers[:-1]))
                        summed.update(numbers)
            return found

        lanes, last = [steps_of(lane) for lane in self.lanes], steps_of([self.last])
        callers: list[tuple[int, View]] = []
        regions: list[tuple[int, View]] = []
        for view, number in views.items():
            (callers if view[0] in ("in", "out") else regions).append((number, view))
        return Steps(lanes, last, callers, regions, summed, {})


class Call:
    """A handle of a collective, which runs at the first call of `wait`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def is_completed(self) -> bool:
        """Return whether the collective has run."""
        return self._run is None

    def wait(self) -> None:
        """Run the collective unless it has already run."""
        if self._run is not None:
            self._run()
            self._run = None


class OneSided:
    """Runs the steps of one rank of a collective plan, in memory that the ranks of a host share.

    The checker must have accepted the collective plan. All ranks must call each method together.

    Raises:
        SharedMemoryError: the ranks cannot share memory. All ranks raise this error.
        CommunicationError: a rank did not join the construction.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.group, self.rank = plan, group, dist.get_rank(group)
        self.walked = walk(plan)
        self._program = Program(self.walked, self.rank)
        slots = max(1, plan.temporary, self._program.staged)
        self._most = max(LEAST_BYTES, min(MOST_BYTES, TMP_BYTES // slots // 64 * 64))
        self._posted: dict[int, int] = defaultdict(int)
        self._calls = 0
        self._for_sizes = lru_cache(MOST_SIZES)(self._compiled)
        self._share(min(FIRST_BYTES, self._most))

    def _share(self, slot: int, is_large: bool = False) -> None:
        """Share new memory with `slot` bytes per slot; slower ranks may still use the old memory."""
        channels = len(self.plan.channels)
        self.memory = SharedMemory(self.group, channels, self._bytes(slot), is_large)
        # A channel's count of signals is a word of memory that the channel's source rank writes.
        self._words = range(0, channels * WORDS_OF_LINE, WORDS_OF_LINE)
        self._counts, self._slot = [0] * channels, slot
        self._for_sizes.cache_clear()

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        """Return a handle whose `wait` runs the plan with input buffer `own` and output buffer `out`.

        Both tensors are contiguous, with elements along their first dimension.

        Raises:
            DistBackendError: in `wait`, a rank did not respond within the group's time-out.
        """
        return Call(lambda: self._call(own, out, sizes))

    def _call(self, own: Tensor, out: Tensor, sizes: Sizes) -> None:
        shape = own.shape if own.dim() > 1 else out.shape
        width = shape[1:].numel() if len(shape) > 1 else 1
        needed = self._longest(sizes) * width * own.element_size()
        if self._slot < min(needed, self._most):
            self._grow(needed)
        flat = {"in": own.detach().view(-1), "out": out.detach().view(-1)}
        raw = {buffer: tensor.view(torch.uint8).numpy() for buffer, tensor in flat.items()}
        for offset, steps in self._for_sizes(sizes, width, own.dtype):
            self._run(offset, steps, flat, raw)

    def _longest(self, sizes: Sizes) -> int:
        """Return the number of rows in the longest chunk, which is equal on all ranks."""
        longest = sizes if isinstance(sizes, int) else max(map(max, sizes))
        return -(-longest // self.plan.chunks)

    def _run(
        self, offset: int, steps: Steps, flat: dict[str, Tensor], raw: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        """Run the plan for one slice, which begins at element `offset` of each chunk."""
        self._calls += 1
        parity, itemsize = self._calls % 2, flat["in"].itemsize
        if parity not in steps.opened:
            steps.opened[parity] = self._open(steps, parity, flat["in"].dtype)
        arrays, tensors = (views.copy() for views in steps.opened[parity])
        for number, (buffer, _, start, length) in steps.callers:
            first = start + offset
            arrays[number] = raw[buffer][first * itemsize : (first + length) * itemsize]
            if number in steps.summed:
                tensor = flat[buffer]
                tensors[number] = tensor if length == len(tensor) else tensor[first : first + length]
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
        self._advance(steps.last, 0, arrays, tensors)

    def _awaited(self, steps: Iterable[Step]) -> Iterator[int]:
        return (self.plan.channels[number].source for code, number, _ in steps if code == WAIT)

    def _advance(self, steps: list[Step], at: int, arrays: list[Any], tensors: list[Any]) -> int:
        """Run a lane's steps from index `at` until a step would have to wait; return this step's index."""
        memory, words, counts = self.memory.words, self._words, self._counts
        for code, target, source in steps[at:] if at else steps:
            if code == COPY:
                arrays[target][...] = arrays[source]
            elif code == SIGNAL:
                counts[target] += 1
                memory[words[target]] = counts[target]
            elif code == WAIT:
                if memory[words[target]] <= counts[target]:
                    return at
                counts[target] += 1
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

    def _bytes(self, slot: int) -> int:
        """Return the bytes of a rank's memory region if each slot has `slot` bytes."""
        return slot * (2 * self.plan.temporary + self._program.staged)

    def _open(self, steps: Steps, parity: int, dtype: torch.dtype) -> Views:
        """Return arrays and tensors for views of shared memory, and None for the caller's views."""
        arrays: list[Any] = [None] * (len(steps.callers) + len(steps.regions))
        tensors = arrays.copy()
        for number, (buffer, rank, start, length) in steps.regions:
            slots = self.plan.temporary * (parity if buffer == "tmp" else 2)
            first = slots * self._slot + start * dtype.itemsize
            arrays[number] = self.memory.region(rank)[first : first + length * dtype.itemsize]
            if number in steps.summed:
                tensors[number] = torch.from_numpy(arrays[number]).view(dtype)
        return arrays, tensors

    def _grow(self, needed: int) -> None:
        """Replace the shared memory by memory with larger slots if the host has enough memory."""
        slot = self._slot
        while slot < min(needed, self._most):
            slot = min(GROWTH * slot, self._most)
        try:
            self._share(slot, is_large=True)
        except SharedMemoryError:
            self._most = self._slot

    def _compiled(self, sizes: Sizes, width: int, dtype: torch.dtype) -> list[tuple[int, Steps]]:
        """Return a pair for each slice: the slice's first element in each chunk, and the slice's steps."""
        longest = self._longest(sizes) * width
        window = min(longest, self._slot // dtype.itemsize)
        made: dict[tuple[int, ...], Steps] = {}
        slices = []
        for offset in range(0, longest, window or 1):
            layout = Layout(self.walked, sizes, width, range(offset, offset + window))
            key = tuple(map(layout.length, self._program.kinds))
            if key not in made:
                made[key] = self._program.steps(layout)
            slices.append((offset, made[key]))
        return slices
