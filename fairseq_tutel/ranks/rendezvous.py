"""Meeting: ranks find each other within the time-out, or end with a sentence.

torch waits half an hour for a rank that died before it came, and names nobody.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import distributed_c10d

from fairseq_tutel.ranks.guard import (
    CommunicationError,
    how_to_wait_longer,
    is_of_communication,
    watched,
)

# Where torch keeps what `init_process_group` waits for without a `timeout`.
DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")


@contextlib.contextmanager
def meeting(rank: int, world_size: int, seconds: int) -> Iterator[Callable[[], None]]:
    """Let ranks meet in the block, which makes the default group and then calls what it is given.

    Until then groups wait `seconds`, and an error is explained; what comes later is left alone.

    Args:
        rank: of this process.
        world_size: W.
        seconds: how long ranks wait for each other; 0 for as long as torch does.

    Raises:
        CommunicationError: a rank did not come.
    """
    start, waiting = time.perf_counter(), [True]
    with contextlib.ExitStack() as until_met:
        for name in DEFAULTS if seconds else ():
            until_met.callback(setattr, distributed_c10d, name, getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, timedelta(seconds=seconds))
        until_met.enter_context(watched("its way to the others", rank))
        until_met.callback(waiting.clear)
        try:
            yield until_met.close
        except RuntimeError as error:
            if not (waiting and is_of_communication(error)):
                raise
            reason = str(error).partition("\n")[0].rstrip(".")
            seconds_passed = time.perf_counter() - start
            raise CommunicationError(
                f"rank {rank} could not meet the other ranks of {world_size} and gave up after "
                f"{seconds_passed:.1f} s ({reason}); look at the logs of rank 0 and of those that did not "
                f"come, or {how_to_wait_longer(seconds)} where they are only slow to start."
            ) from error
