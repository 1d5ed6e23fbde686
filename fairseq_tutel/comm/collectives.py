"""Collectives: the one door to torch.distributed's collectives of tensors.

Each is guarded: where a rank fails, the others' error names it and the operation. `operation` ends the
sentence "rank 1 could not finish …"; a group of None is all ranks, one where torch.distributed is not used.
Tensors lie on the device of the group's backend: NCCL sees no host memory. G ranks of a group.

A collective whose sizes may run by a plan says so; which one does, `plan_choice` decides. Plans are not
for what is told once, such as checkpoints.

What ranks tell each other in Python objects is in `ranks.world`, what they compare in the store beside in
`ranks.agreement`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.executors import backend
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.guard import guarded

Group = dist.ProcessGroup | None
# torch 2.13 renamed them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """What torch or a plan has begun."""

    def is_completed(self) -> bool:
        """Whether `wait` would not wait for another rank."""

    def wait(self) -> Any:
        """Wait for it; on a GPU the stream does."""


class Started:
    """A collective on its way, and what is done with what came."""

    def __init__(self, work: Work, operation: str, group: Group) -> None:
        self.work, self.operation, self.group = work, operation, group
        self.arrived: Callable[[], Any] = lambda: None

    def then(self, arrived: Callable[[], Any]) -> "Started":
        """Let `wait` call this, once, after it has come; return self."""
        self.arrived = arrived
        return self

    def is_done(self) -> bool:
        """Whether `wait` would not wait for another rank."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Wait for it, and do what is to be done then; on a GPU the stream does."""
        with guarded(self.operation, self.group):
            self.work.wait()
        self.arrived()


def start_all_reduce(own: Tensor, operation: str, group: Group = None) -> tuple[Started, Tensor]:
    """Begin to sum all ranks' tensors, by a plan or torch; return where the sum will be.

    That is `own` itself, or a tensor of its shape.
    """
    with guarded(operation, group):
        program = backend.chosen("all_reduce", own, operation, group)
        if program is None:
            return Started(dist.all_reduce(own, group=group, async_op=True), operation, group), own
        total = torch.empty_like(own)
        call = program.start(own.view(-1), total.view(-1), own.numel())
        return Started(call, operation, group), total


def all_reduce(
    tensor: Tensor, operation: str, group: Group = None, op: Any = dist.ReduceOp.SUM
) -> None:
    """Put the sum (or maximum, …) of all ranks' tensors in the place of each."""
    if group is None and world.size() == 1:
        return
    with guarded(operation, group):
        dist.all_reduce(tensor, op=op, group=group)


def all_gather(own: Tensor, operation: str, group: Group = None) -> Tensor:
    """Return [G, ...], every rank's tensor [...]."""
    number = world.size() if group is None else dist.get_world_size(group)
    stacked = own.new_empty(number, *own.shape)
    with guarded(operation, group):
        _all_gather(stacked.view(-1), own.contiguous().view(-1), group=group)
    return stacked


def start_all_gather(whole: Tensor, own: Tensor, operation: str, group: Group = None) -> Started:
    """Begin to bring every rank's `own` [m] to `whole` [G * m], by a plan or torch."""
    with guarded(operation, group):
        program = backend.chosen("all_gather", own, operation, group)
        if program is not None:
            return Started(program.start(own, whole, own.numel()), operation, group)
        return Started(_all_gather(whole, own, group=group, async_op=True), operation, group)


def start_reduce_scatter(
    own: Tensor, whole: Tensor, operation: str, group: Group = None, as_list: bool = False
) -> Started:
    """Begin to sum all ranks' `whole`, of which part g, for `own`, goes to rank g; by a plan or torch.

    Args:
        own: contiguous, m elements.
        whole: contiguous, G * m elements.
        operation: see above.
        group: the ranks.
        as_list: give torch a list of G tensors, which gloo adds up in another order.
    """
    own, whole = own.view(-1), whole.view(-1)
    with guarded(operation, group):
        program = backend.chosen("reduce_scatter", whole, operation, group)
        if program is not None:
            work: Work = program.start(whole, own, own.numel())
        elif as_list:
            parts = list(whole.view(dist.get_world_size(group), own.numel()))
            work = dist.reduce_scatter(own, parts, group=group, async_op=True)
        else:
            work = _reduce_scatter(own, whole, group=group, async_op=True)
        return Started(work, operation, group)


def gather(own: Tensor, operation: str, group: Group = None) -> list[Tensor] | None:
    """Return every rank's tensor on rank 0 of the job, which is in the group; None on the others."""
    number = world.size() if group is None else dist.get_world_size(group)
    parts = list(own.new_empty(number, *own.shape)) if world.rank() == 0 else None
    with guarded(operation, group):
        dist.gather(own, parts, dst=0, group=group)
    return parts


def all_to_all(
    rows: Tensor,
    operation: str,
    group: dist.ProcessGroup,
    receive: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
) -> Tensor:
    """Send block p of the rows to rank p of the group; return what came, by source.

    Args:
        rows: contiguous; G blocks.
        operation: see above.
        group: the ranks.
        receive: rows from each rank; None where all blocks are alike.
        send: rows to each rank; likewise.
    """
    out = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
    with guarded(operation, group):
        dist.all_to_all_single(
            out, rows, receive and list(receive), send and list(send), group=group
        )
    return out


def start_send(
    tensor: Tensor, peer: int, operation: str, group: Group = None, tag: int = 0
) -> Started:
    """Begin to send a tensor to a rank of the group; it may not be written before it has left."""
    with guarded(operation, group):
        work: Any = dist.isend(tensor, world.rank_in_job(peer, group), group, tag)
        return Started(work, operation, group)


def start_receive(
    tensor: Tensor, peer: int, operation: str, group: Group = None, tag: int = 0
) -> Started:
    """Begin to receive a tensor from a rank of the group."""
    with guarded(operation, group):
        work: Any = dist.irecv(tensor, world.rank_in_job(peer, group), group, tag)
        return Started(work, operation, group)


def all_to_all_by(
    plan: str,
    rows: Tensor,
    operation: str,
    group: dist.ProcessGroup,
    sizes_GG: tuple[tuple[int, ...], ...],
) -> Tensor:
    """As `all_to_all`, by the plan of a name.

    Args:
        plan: that `backend.use` was given.
        rows: contiguous; G blocks.
        operation: see above.
        group: the ranks.
        sizes_GG: rows of every block by source and destination.
    """
    rank = dist.get_rank(group)
    out = rows.new_empty(sum(row[rank] for row in sizes_GG), *rows.shape[1:])
    with guarded(operation, group):
        backend.named(plan, rows, group).start(rows, out, sizes_GG).wait()
    return out


def barrier() -> None:
    """Wait until all ranks have come."""
    if world.size() > 1:
        with guarded("the meeting of all ranks"):
            dist.barrier()
