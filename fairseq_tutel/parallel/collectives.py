"""Only this module calls torch.distributed's collectives on tensors.

If a rank fails, the error on other ranks names the failed rank and the collective. The argument `operation`
completes the sentence "rank 1 could not finish …". The group None has all ranks of the job. Without
torch.distributed, a job has only this rank. Tensors must be on the device of the group's backend, because
NCCL cannot send host memory. A group has G ranks. `parallel/world.py` sends Python objects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.parallel import background, world
from fairseq_tutel.parallel.guard import guarded

Group = dist.ProcessGroup | None
# torch 2.13 renamed these collectives to reduce_scatter_single and all_gather_single.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# The `PlanBackend` that runs some collectives instead of torch. All ranks use equal backends.
_backend: Any = None


def use(backend: Any) -> None:
    """Set the `PlanBackend` that runs collectives from now on. With None, torch runs all collectives."""
    global _backend
    _backend = backend


def is_replaced(collective: str, group: Group) -> bool:
    """Return whether a plan backend, not torch, runs a collective for at least some tensor sizes."""
    return _backend is not None and bool(_backend.has(collective, group))


def _chosen(collective: str, own: Tensor, operation: str, group: Group) -> Any:
    return _backend and _backend.chosen(collective, own, operation, group)


class Started:
    """A collective that has started, with a function to call after the collective finishes."""

    def __init__(self, work: Any, operation: str, group: Group) -> None:
        self.work, self.operation, self.group = work, operation, group
        self.arrived: Callable[[], Any] = lambda: None

    def then(self, arrived: Callable[[], Any]) -> "Started":
        """Set a function that `wait` calls after the collective finishes. Return this object."""
        self.arrived = arrived
        return self

    def wait(self) -> None:
        """Wait for the collective, and call the function set with `then`; on a GPU, the stream waits."""
        with guarded(self.operation, self.group):
            self.work.wait()
        self.arrived()


def start_all_reduce(own: Tensor, operation: str, group: Group = None) -> tuple[Started, Tensor]:
    """Start to sum all ranks' tensors. Return a handle and the tensor that will hold the sum.

    With a collective plan, the sum is in a new tensor. With torch, the sum is in `own`.
    """
    with guarded(operation, group):
        program = _chosen("all_reduce", own, operation, group)
        if program is None:
            return Started(dist.all_reduce(own, group=group, async_op=True), operation, group), own
        total = torch.empty_like(own)
        call = program.start(own.view(-1), total.view(-1), own.numel())
        return Started(call, operation, group), total


def all_reduce(tensor: Tensor, operation: str, group: Group = None, op: Any = dist.ReduceOp.SUM) -> None:
    """Replace each rank's tensor by the sum of all ranks' tensors, or by a reduction with `op`."""
    if group is None and world.size() == 1:
        return
    with guarded(operation, group):
        dist.all_reduce(tensor, op=op, group=group)


def all_gather(own: Tensor, operation: str, group: Group = None) -> Tensor:
    """Gather one tensor [...] from every rank and return the stacked tensors [G, ...]."""
    stacked = own.new_empty(world.size(group), *own.shape)
    with guarded(operation, group):
        _all_gather(stacked.view(-1), own.contiguous().view(-1), group=group)
    return stacked


def start_all_gather(whole: Tensor, own: Tensor, operation: str, group: Group = None) -> Started:
    """Start an all-gather of every rank's tensor `own` [m] into the tensor `whole` [G * m]."""
    with guarded(operation, group):
        program = _chosen("all_gather", own, operation, group)
        if program is not None:
            return Started(program.start(own, whole, own.numel()), operation, group)
        return Started(_all_gather(whole, own, group=group, async_op=True), operation, group)


def start_reduce_scatter(
    own: Tensor, whole: Tensor, operation: str, group: Group = None, as_list: bool = False
) -> Started:
    """Start a reduce-scatter: sum all ranks' `whole` [G * m] and write part g to `own` [m] on rank g.

    The tensors `whole` and `own` are contiguous. With `as_list`, gloo gets a list of G tensors instead
    of one tensor, and adds in a different order. NCCL never gets a list, because NCCL would copy it.
    """
    own, whole = own.view(-1), whole.view(-1)
    with guarded(operation, group):
        program = _chosen("reduce_scatter", whole, operation, group)
        if program is not None:
            work = program.start(whole, own, own.numel())
        elif as_list and not whole.is_cuda:
            parts = list(whole.view(dist.get_world_size(group), own.numel()))
            work = dist.reduce_scatter(own, parts, group=group, async_op=True)
        else:
            work = _reduce_scatter(own, whole, group=group, async_op=True)
            background.free_after(work, whole)
        return Started(work, operation, group)


def gather(own: Tensor, operation: str, group: Group = None) -> list[Tensor] | None:
    """Gather every rank's tensor on rank 0 of the job; return None on the other ranks.

    Rank 0 of the job must be a member of the group.
    """
    parts = list(own.new_empty(world.size(group), *own.shape)) if world.rank() == 0 else None
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
    """Send block p of the contiguous rows to rank p; return the received rows, sorted by source rank.

    `receive` and `send` are the numbers of rows from and to each rank, or None for G equal blocks.
    """
    out = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
    with guarded(operation, group):
        dist.all_to_all_single(out, rows, receive and list(receive), send and list(send), group=group)
    return out


def all_to_all_by(
    name: str, rows: Tensor, operation: str, group: dist.ProcessGroup, sizes_GG: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Run an all-to-all of rows with the plan backend's program `name` instead of torch.

    `sizes_GG[i][j]` is the number of rows that rank i sends to rank j.
    """
    program = _backend.named(name, rows, group) if _backend else None
    if program is None:
        raise ValueError(
            f"a2a_algorithm (--moe-a2a-algorithm) is plan:{name}, but --moe-collective-plans has no "
            f"all_to_all plan of this name for {dist.get_world_size(group)} ranks; add such a plan."
        )
    rank = dist.get_rank(group)
    out = rows.new_empty(sum(row[rank] for row in sizes_GG), *rows.shape[1:])
    with guarded(operation, group):
        program.start(rows, out, sizes_GG).wait()
    return out


def barrier() -> None:
    """Wait until all ranks of the job have called `barrier`."""
    if world.size() > 1:
        with guarded("the barrier of all ranks"):
            dist.barrier()
