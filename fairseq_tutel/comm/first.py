"""What rank 0 alone does for all, such as work on a folder: its result and its error are everybody's."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fairseq_tutel.comm.guard import guarded


def of_first(action: Callable[[], Any], operation: str) -> Any:
    """Return on all ranks what `action` returns on rank 0, which calls it. Collective.

    Args:
        action: its result can be pickled.
        operation: as `guarded` takes it.

    Raises:
        ValueError: what rank 0 met, in its words.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    done: list[Any] = [None, None]
    if not together or dist.get_rank() == 0:
        try:
            done[0] = action()
        except Exception as error:  # whatever it is, the others wait
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            done[1] = f"{name}{error}"
    if together:
        with guarded(operation):
            dist.broadcast_object_list(done, src=0)
    if done[1] is not None:
        raise ValueError(done[1])
    return done[0]
