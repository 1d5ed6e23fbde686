"""Plans in shared memory: a put copies into another rank's region, a signal raises a number.

A call is cut into slices of each chunk, and the plan runs once per slice. So regions stay small and in the
processor's caches. An element belongs to the same chunk in all slices, so the order of a sum does not
depend on the size. `Program` makes the steps of a slice, once per size. Lanes take turns: a lane that would
wait lets the next one run.

A rank has a memory region that the other ranks write to:

- `tmp`, twice, for even and odd calls;
- `staged`, which replaces `out` if the plan puts into another rank's `out`. It is copied to the caller's
  `out` at the end.

`in` and any other `out` are the caller's tensors. A put is a copy that finishes at once, so a flush needs
no step. Channels of kind `ll` work as `simple` ones.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.checker.data import kind_of
from fairseq_tutel.plans.executors.layout import End, Layout, Move, Sizes, Walked, walk
from fairseq_tutel.plans.executors.shared_memory import Backoff, Channel, rendezvous
from fairseq_tutel.plans.executors.two_sided import add_up
from fairseq_tutel.plans.format import Place, Plan
from fairseq_tutel.plans.format import Step as PlanStep

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


COPY, REDUCE, SIGNAL, WAIT, POST, PEND = range(6)
CODES = {"signal": SIGNAL, "wait": WAIT, "post": POST, "pend": PEND}
# Code; number of the target view, channel or semaphore; numbers of the source views.
Step = tuple[int, Any, Any]


class View(NamedTuple):
    """A run of elements of the caller's `in` or `out`, or of a region's `tmp` or `staged`."""

    buffer: str
    rank: int
    start: int
    length: int


class Steps(NamedTuple):
    """The steps of a rank in one slice.

    Attributes:
        lanes: the steps of each lane.
        last: steps after all lanes.
        views: how many there are.
        callers: by number, the views of the caller's buffers.
        regions: by number, the views of regions.
        summed: numbers of the views that take part in sums.
    """

    lanes: list[list[Step]]
    last: list[Step]
    views: int
    callers: list[tuple[int, View]]
    regions: list[tuple[int, View]]
    summed: set[int]


class Program:
    """The program of one rank, for any size. `staged` is the number of its slots."""

    def __init__(self, walked: Walked, rank: int) -> None:
        plan, self.rank = walked.plan, rank
        ours = [move for move in walked.moves if rank in move.ranks]
        self.kinds = sorted({kind for move in ours for kind in move.kinds})
        is_staged = any(move.op == "put" and move.target[1].buffer == "out" for move in walked.moves)
        self.staged = plan.out_chunks if is_staged else 0

        def home(end: End) -> End:
            owner, (buffer, chunk) = end
            return owner, Place("staged" if is_staged and buffer == "out" else buffer, chunk)

        at = {
            move.site: move._replace(sources=tuple(map(home, move.sources)), target=home(move.target))
            for move in ours
        }
        self.lanes = [
            [(step, at.get((rank, lane, index))) for index, step in enumerate(steps)]
            for lane, steps in enumerate(plan.programs[rank])
        ]
        kinds = tuple(kind_of(plan, rank, Place("out", chunk)) for chunk in range(self.staged))
        ends = (rank, Place("staged", 0)), (rank, Place("out", 0))
        self.last = Move((rank, 0, 0), "copy", ends[:1], ends[1], kinds, 0)

    def steps(self, layout: Layout) -> Steps:
        """Return the steps of the layout's window."""
        views: dict[View, int] = {}
        summed: set[int] = set()

        def moved(move: Move) -> Iterator[Step]:
            ends = (*move.sources, move.target)
            for starts, length in layout.runs(move.kinds, *ends):
                *sources, target = [
                    views.setdefault(View(place.buffer, rank, start, length), len(views))
                    for (rank, place), start in zip(ends, starts, strict=True)
                ]
                if len(sources) == 1:
                    yield COPY, target, sources[0]
                else:
                    summed.update(sources, [target])
                    yield REDUCE, target, sources

        def steps_of(step: PlanStep, move: Move | None) -> Iterator[Step]:
            if move is not None:
                yield from moved(move)
            elif step.op in CODES:
                yield CODES[step.op], step.semaphore if step.channel is None else step.channel, None

        lanes = [[each for pair in lane for each in steps_of(*pair)] for lane in self.lanes]
        last = list(moved(self.last))
        callers, regions = [], []
        for view, number in views.items():
            (callers if view.buffer in ("in", "out") else regions).append((number, view))
        return Steps(lanes, last, len(views), callers, regions, summed)


# By number, views for numpy, and for torch those that take part in sums.
Views = tuple[list[Any], list[Any]]


class Slice(NamedTuple):
    """A slice of a call.

    Attributes:
        offset: distance from the first slice, in elements of each chunk.
        steps: this rank's steps.
        regions: by parity of the call, the views of regions, made at the first use.
    """

    offset: int
    steps: Steps
    regions: dict[int, Views]


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
        steps, parity = each.steps, self._calls % 2
        if parity not in each.regions:
            each.regions[parity] = self._region(steps, parity, flat["in"].dtype)
        arrays, tensors = (views.copy() for views in each.regions[parity])
        for number, (buffer, _, start, length) in steps.callers:
            first = start + each.offset
            whole = length == moved[buffer].size
            arrays[number] = moved[buffer] if whole else moved[buffer][first : first + length]
            if number in steps.summed:
                tensors[number] = flat[buffer] if whole else flat[buffer][first : first + length]
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

    def _advance(self, steps: list[Step], at: int, arrays: list[Any], tensors: list[Any]) -> int:
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
        longest = self._longest(sizes) * width
        window = min(longest, self._slot // dtype.itemsize)
        made: dict[tuple[int, ...], Slice] = {}
        slices = []
        for offset in range(0, longest, window or 1):
            layout = Layout(self.walked, sizes, width, range(offset, offset + window))
            key = tuple(map(layout.length, self._program.kinds))
            if key not in made:
                made[key] = Slice(0, self._program.steps(layout), {})
            slices.append(made[key]._replace(offset=offset))
        whole = Layout(self.walked, sizes, width)
        return slices, {buffer: whole.starts(self.rank, buffer)[-1] for buffer in ("in", "out")}

    def _region(self, steps: Steps, parity: int, dtype: torch.dtype) -> Views:
        arrays: list[Any] = [None] * steps.views
        tensors = arrays.copy()
        for number, view in steps.regions:
            arrays[number] = self._array(view, parity, dtype)
            if number in steps.summed:
                tensors[number] = torch.from_numpy(arrays[number]).view(dtype)
        return arrays, tensors


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _for_numpy(flat: Tensor) -> Array:
    return (flat if flat.dtype in OF_NUMPY else flat.view(INTEGERS[flat.itemsize])).numpy()


@cache
def _type_of_numpy(dtype: torch.dtype) -> Any:
    return _for_numpy(torch.zeros(0, dtype=dtype)).dtype
