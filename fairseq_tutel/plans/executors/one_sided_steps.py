"""The steps of one rank in shared memory, as one flat list per lane, made once per size.

A rank has a memory region that the other ranks write to:

- `tmp`, twice, for even and odd calls;
- `staged`, which replaces `out` if the plan puts into another rank's `out`. It is copied to the caller's
  `out` at the end.

`in` and any other `out` are the caller's tensors. A put is a copy that finishes at once, so a flush needs
no step. Channels of kind `ll` work as `simple` ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fairseq_tutel.plans.checker.lengths import Kind, kind_of
from fairseq_tutel.plans.executors.layout import Move, Walked, runs
from fairseq_tutel.plans.format import Place
from fairseq_tutel.plans.format import Step as PlanStep

COPY, REDUCE, SIGNAL, WAIT, POST, PEND = range(6)
CODES = {"signal": SIGNAL, "wait": WAIT, "post": POST, "pend": PEND}
# Code; number of the target view, channel or semaphore; numbers of the source views.
Step = tuple[int, Any, Any]


class View(NamedTuple):
    """A run of elements.

    Attributes:
        buffer: the caller's `in` or `out`, or a region's `tmp` or `staged`.
        rank: the owner.
        start: the first element; of the caller's buffers, in the first slice.
        length: number of elements.
    """

    buffer: str
    rank: int
    start: int
    length: int

    @property
    def is_callers(self) -> bool:
        """Return whether each call has its own tensor for this view."""
        return self.buffer in ("in", "out")


class Steps(NamedTuple):
    """The steps of a rank in one slice.

    Attributes:
        lanes: the steps of each lane.
        last: steps after all lanes.
        views: by number; the caller's come last.
        summed: numbers of the views that take part in sums.
    """

    lanes: list[list[Step]]
    last: list[Step]
    views: list[View]
    summed: frozenset[int]


class Program:
    """The program of one rank, for any size.

    Attributes:
        kinds: all chunk kinds that this rank moves or receives.
        lanes: each lane's steps and the chunks that they move.
        staged: slots of `staged`.
        out_chunks: chunks of `out` that are written on this rank.
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
        to_out = [move for move in walked.moves if move.dst.buffer == "out"]
        is_staged = any(move.step.op == "put" for move in to_out)
        self.staged = self.plan.out_chunks if is_staged else 0
        own = (move for move in to_out if move.target == rank)
        self.out_chunks = sorted({move.dst.chunk + i for move in own for i in range(len(move.kinds))})

    def steps(self, lengths: Mapping[Kind, int], starts: Mapping[str, Sequence[int]], stride: int) -> Steps:
        """Return the steps of one slice.

        Args:
            lengths: elements of each kind of chunk in the slice.
            starts: first elements of the chunks of the caller's `in` and `out`.
            stride: elements of a slot.
        """

        def view(rank: int, place: Place, length: int = 0) -> View:
            buffer, chunk = place
            if buffer == "out" and self.staged:
                buffer = "staged"
            start = starts[buffer][chunk] if buffer in starts else chunk * stride
            return View(buffer, rank, start, length)

        def moved(move: Move) -> Iterator[Step]:
            places = [*((self.rank, place) for place in move.step.src), (move.target, move.dst)]
            views = [
                [view(rank, Place(at.buffer, at.chunk + i)) for rank, at in places]
                for i in range(len(move.kinds))
            ]
            found = runs(
                [lengths[kind] for kind in move.kinds],
                ([each.start for each in at] for at in views),
            )
            for firsts, n in found:
                *src, dst = (
                    each._replace(start=first, length=n)
                    for each, first in zip(views[0], firsts, strict=True)
                )
                yield (COPY, dst, src[0]) if len(src) == 1 else (REDUCE, dst, src)

        def steps_of(step: PlanStep, move: Move | None) -> Iterator[Step]:
            if move is not None:
                yield from moved(move)
            elif step.op in CODES:
                number = step.semaphore if step.channel is None else step.channel
                yield CODES[step.op], number, None

        lanes = [[each for pair in lane for each in steps_of(*pair)] for lane in self.lanes]
        last: list[Step] = []
        for chunk in self.out_chunks if self.staged else ():
            place = Place("out", chunk)
            if length := lengths[kind_of(self.plan, self.rank, place)]:
                target = View("out", self.rank, starts["out"][chunk], length)
                last.append((COPY, target, view(self.rank, place, length)))
        return _numbered(lanes, last)


def _numbered(lanes: list[list[Step]], last: list[Step]) -> Steps:
    """Replace views by numbers."""
    found: dict[View, None] = {}
    summed: set[View] = set()
    for code, target, source in (step for lane in [*lanes, last] for step in lane):
        views = {COPY: [target, source], REDUCE: [target, *(source or ())]}.get(code, [])
        found.update(dict.fromkeys(views))
        summed.update(views if code == REDUCE else ())
    views = sorted(found, key=lambda view: view.is_callers)
    number: dict[Any, int] = {view: index for index, view in enumerate(views)}

    def all_numbered(steps: list[Step]) -> list[Step]:
        return [
            (
                code,
                number.get(target, target),
                tuple(map(number.get, source)) if code == REDUCE else number.get(source),
            )
            for code, target, source in steps
        ]

    numbers = frozenset(number[view] for view in summed)
    return Steps([all_numbered(lane) for lane in lanes], all_numbered(last), views, numbers)
