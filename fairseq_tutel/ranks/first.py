"""What rank 0 alone does for all, such as work on a folder: its result and its error are everybody's."""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fairseq_tutel.ranks.guard import guarded

# As long a rank waits for another before they tell each other that the work goes on.
PAUSE_SECONDS = 0.5


def of_first(action: Callable[[], Any], operation: str) -> Any:
    """Return on all ranks what `action` returns on rank 0, which calls it. Collective.

    It may take longer than ranks wait for each other: reading a large file does.

    Args:
        action: its result can be pickled.
        operation: as `guarded` takes it.

    Raises:
        ValueError: what rank 0 met, in its words.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    work = Work(action) if not together or dist.get_rank() == 0 else None
    done: list[Any] = [False, None, None]
    while not done[0]:
        if work is not None:
            done = work.look()
        if together:
            with guarded(operation):
                dist.broadcast_object_list(done, src=0)
    error = None if work is None else work.error
    if error is not None and not isinstance(error, ValueError | OSError):
        raise error  # a mistake of ours, told where it was met
    if done[2] is not None:
        raise ValueError(done[2]) from error
    return done[1]


class Work:
    """A function that runs beside this thread, in which collectives say how far it is."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action, self.result = action, None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self) -> list[Any]:
        """Wait a little; return whether it has ended, its result, and its error in words or None."""
        self._thread.join(PAUSE_SECONDS)
        if self._thread.is_alive():
            return [False, None, None]
        if self.error is None:
            return [True, self.result, None]
        name = "" if isinstance(self.error, ValueError) else f"{type(self.error).__name__}: "
        return [True, None, f"{name}{self.error}"]

    def _run(self) -> None:
        try:
            self.result = self.action()
        except Exception as error:  # whatever it is, the others wait
            self.error = error
