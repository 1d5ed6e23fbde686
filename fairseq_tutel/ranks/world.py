"""The world: how many ranks there are, which this is, and what they tell each other in Python objects.

Without torch.distributed there is one rank, and nobody to tell. `of_first` is for what rank 0 alone does
for all, such as work on a folder: its result and its error are everybody's.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fairseq_tutel.ranks.guard import guarded

# As long a rank waits for another before they tell each other that the work goes on.
PAUSE_SECONDS = 0.5


def size() -> int:
    """Return W."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is rank 0, which speaks and writes for all."""
    return rank() == 0


def rank_in_job(rank: int, group: dist.ProcessGroup | None) -> int:
    """Return which rank of the job a rank of a group is; a group of None is all ranks."""
    return rank if group is None else dist.get_global_rank(group, rank)


def told_by_all(own: Any, operation: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank of a group tells, by rank. Collective.

    Args:
        own: can be pickled.
        operation: as `guarded` takes it.
        group: None for all ranks.
    """
    told: list[Any] = [own] * (size() if group is None else dist.get_world_size(group))
    if len(told) > 1:
        with guarded(operation, group):
            dist.all_gather_object(told, own, group=group)
    return told


def told_by_first(own: Any, operation: str, group: dist.ProcessGroup | None = None) -> Any:
    """Return what the first rank of a group tells, None for all ranks. Collective; see `told_by_all`."""
    told = [own]
    if size() > 1:
        with guarded(operation, group):
            dist.broadcast_object_list(told, src=rank_in_job(0, group), group=group)
    return told[0]


def of_first(action: Callable[[], Any], operation: str) -> Any:
    """Return on all ranks what `action` returns on rank 0, which calls it. Collective.

    It may take longer than ranks wait for each other: reading a large file does.

    Args:
        action: its result can be pickled.
        operation: as `guarded` takes it.

    Raises:
        ValueError: what rank 0 met, in its words.
    """
    work = Work(action) if is_first() else None
    ended = False
    while not ended:
        own = None if work is None else work.look()
        ended, result, sentence = told_by_first(own, operation)
    error = None if work is None else work.error
    if error is not None and not isinstance(error, ValueError | OSError):
        raise error  # a mistake of ours, told where it was met
    if sentence is not None:
        raise ValueError(sentence) from error
    return result


class Work:
    """A function that runs beside this thread, in which collectives say how far it is."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action, self.result = action, None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self) -> tuple[bool, Any, str | None]:
        """Wait a little; return whether it has ended, its result, and its error in words or None."""
        self._thread.join(PAUSE_SECONDS)
        if self._thread.is_alive():
            return False, None, None
        if self.error is None:
            return True, self.result, None
        name = "" if isinstance(self.error, ValueError) else f"{type(self.error).__name__}: "
        return True, None, f"{name}{self.error}"

    def _run(self) -> None:
        try:
            self.result = self.action()
        except Exception as error:  # whatever it is, the others wait
            self.error = error
