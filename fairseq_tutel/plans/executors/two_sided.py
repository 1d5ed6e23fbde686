"""Plans by two-sided messages, over gloo or NCCL.

The plan runs in rounds. In each round a rank sends at most one message to each other rank, with all chunks
for that rank one after another. Between rounds it copies and sums in the plan's order, half types in fp32.
Only a rank itself writes its memory, so `tmp` belongs to one call, and `out` is written between the call's
start and its end.

There is no thread. `start` sends the first round, `wait` the later ones. So calls of a group must start,
and be waited for, in the same order on all ranks. A call that `is_completed` may be waited for earlier. On
a GPU the host never waits.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.executors.layout import Layout, Move, Piece, Sizes, walk
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.ranks import world

MOST_SIZES = 256  # for which a plan stays compiled
HALF = (torch.float16, torch.bfloat16)
Run = tuple[str, int, int]  # buffer, first element, length


class Local(NamedTuple):
    """A copy, or a sum of several runs, on this rank."""

    src: tuple[Run, ...]
    dst: Run


class Round(NamedTuple):
    """A round of one rank: messages by the other rank, then its own steps."""

    send: list[tuple[int, list[Run]]]
    receive: list[tuple[int, list[Run]]]
    steps: list[Local]


class Call:
    """A plan that has started."""

    def __init__(
        self,
        rounds: Sequence[Round],
        buffers: dict[str, Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.rounds, self.buffers, self.group = rounds, buffers, group
        self.at = 0
        self.works: list[dist.Work] = []
        self.sent: list[Tensor] = []  # kept until it has been sent
        self.came: list[tuple[Tensor, list[Run]]] = []
        self._end_round()  # round 0 has no messages

    def is_completed(self) -> bool:
        """Return whether `wait` would return without waiting for another rank."""
        left = len(self.rounds) - self.at
        return left == 0 or (left == 1 and all(work.is_completed() for work in self.works))

    def wait(self) -> None:
        """Run the remaining rounds; on a GPU the stream does."""
        while self.at < len(self.rounds):
            self._end_round()

    @torch.no_grad()
    def _end_round(self) -> None:
        """Wait for this round's messages, take this rank's steps, start the next round."""
        for work in self.works:
            work.wait()
        for message, runs in self.came:
            for part, run in zip(message.split([run[2] for run in runs]), runs, strict=True):
                self._view(run).copy_(part)
        for src, dst in self.rounds[self.at].steps:
            add_up([self._view(run) for run in src], self._view(dst))
        self.works, self.sent, self.came = [], [], []
        self.at += 1
        if self.at < len(self.rounds):
            self._send(self.rounds[self.at])

    def _send(self, messages: Round) -> None:
        operations = []
        for rank, runs in messages.receive:
            whole = self._view(runs[0])
            if len(runs) > 1:
                whole = whole.new_empty(sum(run[2] for run in runs), *whole.shape[1:])
                self.came.append((whole, runs))
            operations.append(self._operation(dist.irecv, whole, rank))
        for rank, runs in messages.send:
            views = [self._view(run) for run in runs]
            self.sent.append(views[0] if len(views) == 1 else torch.cat(views))
            operations.append(self._operation(dist.isend, self.sent[-1], rank))
        if operations:
            self.works = dist.batch_isend_irecv(operations)

    def _operation(self, direction: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(direction, tensor, world.rank_in_job(rank, self.group), self.group)

    def _view(self, run: Run) -> Tensor:
        buffer, start, length = run
        return self.buffers[buffer].narrow(0, start, length)


def add_up(sources: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of tensors, in their order, to `out`, which may be the first; half types in fp32."""
    first, *others = sources
    if not others:
        out.copy_(first)
    elif out.dtype in HALF:
        total = first.float()
        for other in others:
            total += other
        out.copy_(total)
    else:
        torch.add(first, others[0], out=out)
        for other in others[1:]:
            out += other


class TwoSided:
    """A plan that one rank runs by messages.

    Args:
        plan: a plan for the group's number of ranks that the checker has accepted.
        group: the ranks; None: all.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.group, self.is_new = plan, group, True
        self.walked, self.rank = walk(plan), dist.get_rank(group)
        self._for_sizes = lru_cache(MOST_SIZES)(self._compiled)
        last = max((move.round for move in self.walked.moves), default=0)
        self._steps: list[list[Move]] = [[] for _ in range(last + 1)]
        self._messages: list[dict[tuple[int, int], list[Move]]]
        self._messages = [defaultdict(list) for _ in range(last + 1)]
        for move in self.walked.moves:
            if move.op == "put" and self.rank in (move.rank, move.target):
                self._messages[move.round][move.rank, move.target].append(move)
            elif move.op != "put" and move.rank == self.rank:
                self._steps[move.round].append(move)

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        """Start a call.

        Args:
            own: `in`, contiguous, elements along its first dimension; it is not written.
            out: `out`, likewise, another tensor.
            sizes: elements of a shard, or of each block of an all_to_all.
        """
        if self.is_new and own.is_cuda:
            # NCCL needs all ranks in a group's first call, and a round may have no message for some.
            dist.all_reduce(own.new_zeros(1), group=self.group)
        self.is_new = False
        rounds, slots = self._for_sizes(sizes)
        tmp = own.new_empty(slots, *own.shape[1:])
        return Call(rounds, {"in": own, "out": out, "tmp": tmp}, self.group)

    def _compiled(self, sizes: Sizes) -> tuple[list[Round], int]:
        """Return the rounds, and the elements of `tmp`."""
        layout = Layout(self.walked, sizes)
        rounds = []
        for steps, messages in zip(self._steps, self._messages, strict=True):
            send = [(to, _sent(m, layout)) for (of, to), m in messages.items() if of == self.rank]
            receive = [(of, _received(m, layout)) for (of, to), m in messages.items() if to == self.rank]
            local = [_local(move, piece) for move in steps for piece in layout.pieces(move)]
            rounds.append(Round([m for m in send if m[1]], [m for m in receive if m[1]], local))
        return rounds, layout.size(self.rank, "tmp")


def _sent(moves: Sequence[Move], layout: Layout) -> list[Run]:
    return _joined(
        (move.src[0].buffer, piece.src[0], piece.length)
        for move in moves
        for piece in layout.pieces(move, dst=False)
    )


def _received(moves: Sequence[Move], layout: Layout) -> list[Run]:
    return _joined(
        (move.dst.buffer, piece.dst, piece.length)
        for move in moves
        for piece in layout.pieces(move, src=False)
    )


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Join adjacent runs."""
    found: list[Run] = []
    for buffer, start, length in runs:
        if found and found[-1][0] == buffer and sum(found[-1][1:]) == start:
            found[-1] = (buffer, found[-1][1], found[-1][2] + length)
        else:
            found.append((buffer, start, length))
    return found


def _local(move: Move, piece: Piece) -> Local:
    sources = zip(move.src, piece.src, strict=True)
    return Local(
        tuple((place.buffer, at, piece.length) for place, at in sources),
        (move.dst.buffer, piece.dst, piece.length),
    )
