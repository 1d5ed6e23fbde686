"""Functions that count ranks, send Python objects between ranks, and end all ranks together.

Without torch.distributed, this process is the only rank. `operation` names a collective in error messages.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel.failures import FailureWatch
from fairseq_tutel.parallel.guard import guarded
from fairseq_tutel.parallel.signals import EXIT_CODE

# In `run_on_rank_zero`, rank 0 reports at this interval whether the function has ended.
PAUSE_SECONDS = 0.5


def size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in a group; None means all ranks."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Return whether this process is rank 0, which logs and writes files for all ranks."""
    return rank() == 0


def rank_in_job(rank: int, group: dist.ProcessGroup | None) -> int:
    """Convert a rank within a group to the rank within the job. None is the group of all ranks."""
    return rank if group is None else dist.get_global_rank(group, rank)


@contextlib.contextmanager
def ending_together(operation: str) -> Iterator[None]:
    """Context manager in which an error on one rank ends all ranks. Leaving the block is collective.

    After the block, or a SystemExit in the block with code 0 or EXIT_CODE (a preempted run), all ranks wait
    for each other and destroy all process groups. Without this wait, a process can abort in NCCL at exit.
    """
    if not dist.is_initialized():
        yield
        return
    store: Any = distributed_c10d._get_default_store()
    # A file store has no extended API, which the failure watch needs.
    watch, end = FailureWatch(store, rank()) if store.has_extended_api() else None, None
    try:
        with guarded(operation):
            try:
                yield
            except SystemExit as error:
                if error.code not in (None, 0, EXIT_CODE):
                    raise
                end = error
        all_gather_object(None, "the end of all ranks")
    except BaseException as error:
        if watch is not None:
            watch.report(error)
        raise
    if watch is not None:
        watch.close()
    dist.destroy_process_group()
    if end is not None:
        raise end


def all_gather_object(own: Any, operation: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks of a group, in rank order. None means all ranks. Collective."""
    objects: list[Any] = [own] * size(group)
    if len(objects) > 1:
        with guarded(operation, group):
            dist.all_gather_object(objects, own, group=group)
    return objects


def broadcast_object(own: Any, operation: str, group: dist.ProcessGroup | None = None) -> Any:
    """Send the object of a group's first rank to all ranks of the group, and return it. Collective."""
    objects = [own]
    if size() > 1:
        with guarded(operation, group):
            dist.broadcast_object_list(objects, src=rank_in_job(0, group), group=group)
    return objects[0]


def run_on_rank_zero(action: Callable[[], Any], operation: str) -> Any:
    """Call a function on rank 0. On all ranks, return the function's result or raise its error. Collective.

    The function may take longer than the time-out of collectives, for example to read a large file.
    """
    work = Work(action) if is_first() else None
    ended = False
    while not ended:
        ended, result, sentence = broadcast_object(work and work.look(), operation)
    error = None if work is None else work.error
    if error is not None and not isinstance(error, ValueError | OSError):
        raise error  # Only rank 0 prints the traceback of a bug.
    if sentence is not None:
        raise ValueError(sentence) from error
    return result


class Work:
    """Runs a function in a thread; rank 0 can meanwhile send the function's status to other ranks."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.result = action()
            except Exception as error:  # `look` returns the error's message.
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def look(self) -> tuple[bool, Any, str | None]:
        """Wait briefly for the function. Return whether it has ended, its result, and any error message."""
        self._thread.join(PAUSE_SECONDS)
        if self._thread.is_alive():
            return False, None, None
        if self.error is None:
            return True, self.result, None
        name = "" if isinstance(self.error, ValueError) else f"{type(self.error).__name__}: "
        return True, None, f"{name}{self.error}"
