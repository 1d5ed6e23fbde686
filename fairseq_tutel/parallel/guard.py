"""Converts failures of collectives to errors that name the rank, the operation and missing ranks.

torch's own errors name at most a socket. After a failed collective, a rank reads the job's first
failure from the rendezvous store (see failures.py). If the store has no failure, the rank runs a health
check and names the ranks that did not answer. No code catches a CommunicationError, so the process ends.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel import failures

# A health check takes at most this number of seconds, or the time-out of collectives if that is shorter.
LONGEST_CHECK = 3.0
# A rank waits this many additional seconds for a store that hangs. Rank 0 may run the store, so rank 0
# waits this number of seconds before it exits.
GRACE_SECONDS = 1.0
WAIT_LONGER = "raise --moe-comm-timeout"
PRESENT = "fairseq_tutel/health_check"
# RuntimeErrors with these texts are from gloo or, for "Wait timeout", from a file store.
MARKS = ("gloo/transport", "gloo/rendezvous", "Gloo connectFullMesh failed", "Wait timeout")


class CommunicationError(RuntimeError):
    """A collective failed. The error message names the rank, the operation and missing ranks."""


_timeout: timedelta | None = None


def set_timeout(seconds: int) -> None:
    """Set the time-out of collectives for groups created from now on. 0 keeps torch's default."""
    global _timeout
    _timeout = timedelta(seconds=seconds) if seconds else None


def timeout_of_groups() -> timedelta | None:
    """Return the time-out of collectives for new groups, or None for torch's default."""
    return _timeout


def limit(group: dist.ProcessGroup | None) -> None:
    """Apply the time-out of `set_timeout` to an existing group, or to the default group for None."""
    if _timeout:
        distributed_c10d._set_pg_timeout(_timeout, group)


class guarded:  # noqa: N801 - a context manager
    """Context manager that converts a failed collective to a CommunicationError with an explanation.

    `guarded` does not change other errors, nor errors that an inner `guarded` has explained. `operation`,
    such as "the exchange of rows", completes the sentence "rank 1 could not finish …".
    """

    __slots__ = ("group", "operation")

    def __init__(self, operation: str, group: dist.ProcessGroup | None = None) -> None:
        self.operation, self.group = operation, group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_of_communication(error):
            reason = failures.look() or _check_health(self.group)
            raise CommunicationError(
                f"rank {dist.get_rank()} could not finish {self.operation}: {reason}."
            ) from error


def is_of_communication(error: BaseException) -> bool:
    """Return whether torch raised this error because communication with another rank failed.

    The result is False for an error that an inner guard has already explained.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in MARKS)


def absent(store: dist.Store, prefix: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks without a key `prefix/rank` in the store, found with few requests by bisection."""
    if not ranks or store.check([f"{prefix}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return absent(store, prefix, ranks[:middle]) + absent(store, prefix, ranks[middle:])


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-2, 5" for ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _check_health(group: dist.ProcessGroup | None) -> str:
    """Run a health check of a group's ranks. Return a clause that names the missing ranks.

    Each rank marks itself as present in the store and waits for the marks of the other ranks. A failed job
    does not continue, so every health check can use the same keys.
    """
    ranks = range(dist.get_world_size()) if group is None else sorted(dist.get_process_group_ranks(group))
    seconds = min(_timeout.total_seconds() if _timeout else LONGEST_CHECK, LONGEST_CHECK)
    missing: list[int] | None = None

    def check() -> None:
        nonlocal missing
        store = distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError):
            store.set(f"{PRESENT}/{dist.get_rank()}", "here")
            with contextlib.suppress(dist.DistStoreError):
                store.wait([f"{PRESENT}/{other}" for other in ranks], timedelta(seconds=seconds))
            missing = absent(store, PRESENT, ranks)

    # Calls to a store whose process is stopped never return.
    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(seconds + GRACE_SECONDS)
    if dist.get_rank() == 0:
        time.sleep(GRACE_SECONDS)  # Other ranks may still read this process's store.
    if missing is None:
        return failures.no_store()
    if missing:
        name = name_ranks(missing)
        return (
            f"{name} did not answer a health check of {seconds:g} s; look at the log of {name} for the "
            f"reason, or {WAIT_LONGER} if it is only slow"
        )
    return (
        f"{name_ranks(ranks)} answered a health check or ended during it, so a connection broke or one "
        f"rank was late; look for the first error in their logs, or {WAIT_LONGER} if a rank is only slow"
    )
