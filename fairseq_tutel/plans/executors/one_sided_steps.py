"""What one rank does in shared memory for a plan, as a flat list for each lane: made once for a size.

N ranks, C chunks of a shard, S slots of `tmp`. A rank has a region into which others write: `tmp` twice, by
the parity of calls; `staged`, which is `out` where a plan puts into another rank's `out`, copied to
the caller's at the end; and the packets of `ll` channels, twice. `in` and any other `out` are the
caller's tensors. A put is a copy that is over at once, so that a flush has nothing to wait for.

In packets a put's data arrive with their flags, and no signal follows, unless there were no data; the other
end's wait takes them from there to their destination.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fairseq_tutel.plans.checker.lengths import Kind, kind_of
from fairseq_tutel.plans.executors.layout import Move, Walked, runs
from fairseq_tutel.plans.format import Place, Plan
from fairseq_tutel.plans.format import Step as PlanStep

COPY, SIGNAL, WAIT, REDUCE, PACK, UNPACK, POST, PEND = range(8)
# Operation; what it writes and reads, numbers of views, or of a channel or semaphore; the channel, if any.
Step = tuple[int, Any, Any, int]


class View(NamedTuple):
    """A run of elements.

    Attributes:
        buffer: `in` and `out` of the caller; `tmp`, `staged` or `packets` of a region.
        rank: whose.
        start: the first; the caller's in the first slice; of packets, chunks before it.
        length: how many.
    """

    buffer: str
    rank: int
    start: int
    length: int

    @property
    def is_callers(self) -> bool:
        """Whether every call has another one."""
        return self.buffer in ("in", "out")


class Steps(NamedTuple):
    """What a rank does in a slice.

    Attributes:
        lanes: of each its steps.
        last: those after all lanes.
        views: by number; the caller's are the last ones.
        summed: numbers of those that are added up, or sums.
        sent: elements that are put, by rank; those in packets count twice.
    """

    lanes: list[list[Step]]
    last: list[Step]
    views: list[View]
    summed: frozenset[int]
    sent: dict[int, int]


class Program:
    """What one rank does, for any size.

    Args:
        walked: the plan, gone through.
        rank: whose program.

    Attributes:
        kinds: of all chunks that this rank moves, or that others put here.
        staged: slots of `staged`.
        packets: chunks of packets that a region holds, once.
        lanes: of each its steps, and what they move.
        groups: by channel of packets, the puts that go with each signal.
        before: by put in packets, how many chunks lie before it among its target's.
        out_chunks: those of `out` that are written here.
    """

    def __init__(self, walked: Walked, rank: int) -> None:
        self.plan, self.rank = walked.plan, rank
        ours = (move for move in walked.moves if rank in (move.rank, move.target))
        self.kinds = sorted({kind for move in ours for kind in move.kinds})
        at = {(move.rank, move.lane, move.index): move for move in walked.moves}
        self.lanes = [
            [(step, at.get((rank, lane, index))) for index, step in enumerate(steps)]
            for lane, steps in enumerate(self.plan.programs[rank])
        ]
        self.groups = _puts_by_signal(self.plan, at)
        self.before: dict[Move, int] = {}
        packets: dict[int, int] = defaultdict(int)
        into_out = False
        written: set[int] = set()
        for move in walked.moves:
            place = _destination(move)
            if move.target == rank and place.buffer == "out":
                written |= {place.chunk + i for i in range(len(move.kinds))}
            if move.step.op == "put" and _is_packed(self.plan, move.step):
                self.before[move] = packets[move.target]
                packets[move.target] += len(move.kinds)
            elif move.step.op == "put":
                into_out |= place.buffer == "out"
        self.packets = max(packets.values(), default=0)
        self.staged = self.plan.out_chunks if into_out else 0
        self.out_chunks = sorted(written)

    def steps(
        self, lengths: Mapping[Kind, int], starts: Mapping[str, Sequence[int]], stride: int
    ) -> Steps:
        """Return the steps of one slice.

        Args:
            lengths: elements of each kind of chunk in it.
            starts: the first elements of the chunks of the caller's `in` and `out`.
            stride: elements of a slot.
        """
        return _Slice(self, lengths, starts, stride).steps()


class _Slice:
    """Makes the steps of a slice; see `Program.steps`."""

    def __init__(
        self,
        program: Program,
        lengths: Mapping[Kind, int],
        starts: Mapping[str, Sequence[int]],
        stride: int,
    ) -> None:
        self.program, self.plan, self.rank = program, program.plan, program.rank
        self.lengths, self.starts, self.stride = lengths, starts, stride
        self.sent: dict[int, int] = defaultdict(int)
        self.signals: dict[int, int] = defaultdict(int)

    def steps(self) -> Steps:
        lanes = [
            [each for step, move in lane for each in self._of(step, move)]
            for lane in self.program.lanes
        ]
        last = list(self._last()) if self.program.staged else []
        found: dict[View, None] = {}
        for _, target, source, _ in (step for lane in [*lanes, last] for step in lane):
            for each in (target, *(source if isinstance(source, list) else [source])):
                if isinstance(each, View):
                    found[each] = None
        views = sorted(found, key=lambda view: view.is_callers)
        number = {view: index for index, view in enumerate(views)}

        def numbered(each: Any) -> Any:
            return (
                tuple(map(number.get, each)) if isinstance(each, list) else number.get(each, each)
            )

        def all_numbered(steps: list[Step]) -> list[Step]:
            return [(code, numbered(t), numbered(s), channel) for code, t, s, channel in steps]

        lanes, last = [all_numbered(lane) for lane in lanes], all_numbered(last)
        summed = {
            each
            for lane in lanes
            for code, target, source, _ in lane
            if code == REDUCE
            for each in (target, *source)
        }
        return Steps(lanes, last, views, frozenset(summed), dict(self.sent))

    def _of(self, step: PlanStep, move: Move | None) -> Iterator[Step]:
        channel = step.channel
        if move is not None and step.op == "put" and _is_packed(self.plan, step):
            yield from self._packed(move)
        elif move is not None:
            sources = [(self.rank, place) for place in step.src]
            for *src, dst in self._pieces(move, [*sources, (move.target, _destination(move))]):
                self.sent[move.target] += dst.length * (step.op == "put")
                yield (COPY, dst, src[0], -1) if len(src) == 1 else (REDUCE, dst, src, -1)
        elif channel is not None and step.op in ("signal", "wait"):
            moves = []
            if _is_packed(self.plan, step):
                moves = self.program.groups[channel][self.signals[channel]]
                self.signals[channel] += 1
            has_data = any(self.lengths[kind] for each in moves for kind in each.kinds)
            if not has_data:
                yield (SIGNAL if step.op == "signal" else WAIT, channel, channel, channel)
            elif step.op == "wait":
                for each in moves:
                    yield from self._unpacked(each)
        elif step.semaphore is not None:
            yield (POST if step.op == "post" else PEND, step.semaphore, step.semaphore, -1)

    def _packed(self, move: Move) -> Iterator[Step]:
        for i, (packets, _) in enumerate(self._of_packets(move)):
            src = move.step.src[0]
            data = self._view(self.rank, Place(src.buffer, src.chunk + i), packets.length)
            self.sent[move.target] += 2 * packets.length
            if packets.length:
                yield (PACK, packets, data, -1)

    def _unpacked(self, move: Move) -> Iterator[Step]:
        for packets, place in self._of_packets(move):
            if packets.length:
                view = self._view(self.rank, place, packets.length)
                yield (UNPACK, view, packets, move.step.channel or 0)

    def _of_packets(self, move: Move) -> Iterator[tuple[View, Place]]:
        before, place = self.program.before[move], _destination(move)
        for i, kind in enumerate(move.kinds):
            packets = View("packets", move.target, before + i, self.lengths[kind])
            yield packets, Place(place.buffer, place.chunk + i)

    def _last(self) -> Iterator[Step]:
        for chunk in self.program.out_chunks:
            length = self.lengths[kind_of(self.plan, self.rank, Place("out", chunk))]
            if length:
                start = self.starts["out"][chunk]
                staged = View("staged", self.rank, chunk * self.stride, length)
                yield (COPY, View("out", self.rank, start, length), staged, -1)

    def _pieces(self, move: Move, places: Sequence[tuple[int, Place]]) -> list[list[View]]:
        """Return the views of each run at all places, neighbours as one."""
        views = [
            [self._view(rank, Place(at.buffer, at.chunk + i), 0) for rank, at in places]
            for i in range(len(move.kinds))
        ]
        lengths = [self.lengths[kind] for kind in move.kinds]
        found = runs(lengths, ([view.start for view in at] for at in views))
        return [
            [view._replace(start=at, length=n) for view, at in zip(views[0], starts, strict=True)]
            for starts, n in found
        ]

    def _view(self, rank: int, place: Place, length: int) -> View:
        buffer, chunk = place
        if buffer == "out" and self.program.staged:
            buffer = "staged"
        is_callers = buffer in ("in", "out")
        start = self.starts[buffer][chunk] if is_callers else chunk * self.stride
        return View(buffer, rank, start, length)


def _destination(move: Move) -> Place:
    assert move.step.dst is not None, "a put, copy or reduce"
    return move.step.dst


def _is_packed(plan: Plan, step: PlanStep) -> bool:
    return step.channel is not None and plan.channels[step.channel].kind == "ll"


def _puts_by_signal(
    plan: Plan, moves: Mapping[tuple[int, int, int], Move]
) -> dict[int, list[list[Move]]]:
    """Return, for each channel of packets, which puts go with its first signal, its second one, …."""
    groups: dict[int, list[list[Move]]] = defaultdict(list)
    held: dict[int, list[Move]] = defaultdict(list)
    for rank, lane, index, step in plan.steps():
        if step.channel is not None and _is_packed(plan, step):
            if step.op == "put":
                held[step.channel].append(moves[rank, lane, index])
            elif step.op == "signal":
                groups[step.channel].append(held.pop(step.channel, []))
    return groups
