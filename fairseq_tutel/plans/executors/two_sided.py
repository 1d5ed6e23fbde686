"""Executor that runs collective plans by two-sided messages (send and receive), over gloo or NCCL.

The collective plan runs in rounds. In each round, a rank sends at most one message to each other rank. A
message has all chunks for one rank in this round. Between rounds, the rank copies and sums chunks in the
order of the plan. Only the rank itself writes its memory, so each call can allocate a new `tmp` buffer.

`start` sends the messages of the first round, and `wait` sends those of later rounds. All ranks of a group
must therefore start and wait for calls in the same order. On a GPU, the host never waits for messages.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.parallel import world
from fairseq_tutel.plans.executors.layout import Layout, Move, Sizes, walk
from fairseq_tutel.plans.format import Plan

MOST_SIZES = 256  # A plan's rounds are cached for at most this many sizes.
HALF = (torch.float16, torch.bfloat16)
Run = tuple[str, int, int]  # A run is (buffer, first element, length).
Message = tuple[int, list[Run]]  # A message is (other rank, runs of elements).


class Round(NamedTuple):
    """One rank's work in a round: it exchanges messages, and then computes sums."""

    send: list[Message]
    receive: list[Message]
    sums: list[tuple[list[Run], Run]]


class Call:
    """A handle to wait for a collective that has started."""

    def __init__(
        self, rounds: Sequence[Round], buffers: dict[str, Tensor], group: dist.ProcessGroup | None
    ) -> None:
        self.rounds, self.buffers, self.group = rounds, buffers, group
        self.current = 0  # The index of the round whose messages are being sent.
        self.works: list[dist.Work] = []
        self.outgoing: list[Tensor] = []  # Sent tensors are kept until the sends have ended.
        self.incoming: list[tuple[Tensor, list[Run]]] = []  # Messages, and the runs to copy them to.
        self._end_round()  # Round 0 has no messages.

    def is_completed(self) -> bool:
        """Return whether `wait` would return without waiting for another rank."""
        remaining = len(self.rounds) - self.current
        return remaining == 0 or (remaining == 1 and all(work.is_completed() for work in self.works))

    def wait(self) -> None:
        """Run the remaining rounds of the plan. On a GPU, queue the rounds on the stream."""
        while self.current < len(self.rounds):
            self._end_round()

    @torch.no_grad()
    def _end_round(self) -> None:
        """Wait for this round's messages, compute this rank's sums, and start the next round."""
        for work in self.works:
            work.wait()
        for message, runs in self.incoming:
            for part, run in zip(message.split([run[2] for run in runs]), runs, strict=True):
                self._view(run).copy_(part)
        for sources, target in self.rounds[self.current].sums:
            add_up([self._view(run) for run in sources], self._view(target))
        self.works, self.outgoing, self.incoming = [], [], []
        self.current += 1
        if self.current < len(self.rounds):
            self._send(self.rounds[self.current])

    def _send(self, messages: Round) -> None:
        operations = []
        for rank, runs in messages.receive:
            operations.append(self._operation(dist.irecv, self._target(runs), rank))
        for rank, runs in messages.send:
            operations.append(self._operation(dist.isend, self._content(runs), rank))
        if operations:
            self.works = dist.batch_isend_irecv(operations)

    def _target(self, runs: list[Run]) -> Tensor:
        """Return a tensor for a message: the view of its run, or a new tensor that `_end_round` copies."""
        if len(runs) == 1:
            return self._view(runs[0])
        own = self.buffers["in"]
        message = own.new_empty(sum(run[2] for run in runs), *own.shape[1:])
        self.incoming.append((message, runs))
        return message

    def _content(self, runs: Sequence[Run]) -> Tensor:
        """Return the tensor of a message to send."""
        views = [self._view(run) for run in runs]
        self.outgoing.append(views[0] if len(views) == 1 else torch.cat(views))
        return self.outgoing[-1]

    def _operation(self, direction: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(direction, tensor, world.rank_in_job(rank, self.group), self.group)

    def _view(self, run: Run) -> Tensor:
        buffer, start, length = run
        return self.buffers[buffer].narrow(0, start, length)


def add_up(sources: Sequence[Tensor], out: Tensor) -> None:
    """Add tensors in the given order, and write the sum to the tensor `out`.

    The tensor `out` may be the first tensor of the sum. Half-precision tensors are added in fp32.
    """
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
    """Runs one rank's steps of a checked collective plan by send and receive."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None) -> None:
        self.plan, self.group, self.is_new = plan, group, True
        self.walked, self.rank = walk(plan), dist.get_rank(group)
        self._for_sizes = lru_cache(MOST_SIZES)(self._compiled)
        num_rounds = 1 + max((move.round for move in self.walked.moves), default=0)
        self._sums: list[list[Move]] = [[] for _ in range(num_rounds)]
        self._messages: list[dict[tuple[int, int], list[Move]]]
        self._messages = [defaultdict(list) for _ in range(num_rounds)]
        for move in self.walked.moves:
            if self.rank in move.ranks and move.op == "put":
                self._messages[move.round][move.ranks].append(move)
            elif self.rank in move.ranks:
                self._sums[move.round].append(move)

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        """Start the collective, and return a handle whose `wait` finishes it.

        `own` and `out` are the plan's buffers `in` and `out`: contiguous tensors with elements along dim 0.
        """
        if self.is_new and own.is_cuda:
            # The first NCCL call in a group needs all ranks, but a round may have no message for some rank.
            dist.all_reduce(own.new_zeros(1), group=self.group)
        self.is_new = False
        rounds, slots = self._for_sizes(sizes)
        tmp = own.new_empty(slots, *own.shape[1:])
        return Call(rounds, {"in": own, "out": out, "tmp": tmp}, self.group)

    def _compiled(self, sizes: Sizes) -> tuple[list[Round], int]:
        """Return this rank's rounds for shards of the given sizes, and the number of elements of `tmp`."""
        layout = Layout(self.walked, sizes)
        rounds = []
        for moves, messages in zip(self._sums, self._messages, strict=True):
            send: list[Message] = []
            receive: list[Message] = []
            for (source, target), puts in messages.items():
                is_sent = source == self.rank
                if runs := _joined(puts, layout, is_sent):
                    (send if is_sent else receive).append((target if is_sent else source, runs))
            sums = [each for move in moves for each in _sums(move, layout)]
            rounds.append(Round(send, receive, sums))
        return rounds, layout.starts(self.rank, "tmp")[-1]


def _joined(puts: Sequence[Move], layout: Layout, is_sent: bool) -> list[Run]:
    """Return the ranges of elements that a message reads or writes on this rank, joined if adjacent."""
    found: list[Run] = []
    for put in puts:
        end = put.sources[0] if is_sent else put.target
        for ((_, buffer, start),), length in layout.runs(put.kinds, end):
            if found and (found[-1][0], sum(found[-1][1:])) == (buffer, start):
                found[-1] = (buffer, found[-1][1], found[-1][2] + length)
            else:
                found.append((buffer, start, length))
    return found


def _sums(move: Move, layout: Layout) -> Iterator[tuple[list[Run], Run]]:
    for ends, length in layout.runs(move.kinds, *move.sources, move.target):
        *sources, target = [(buffer, start, length) for _, buffer, start in ends]
        yield sources, target
