"""Convert failures of collectives to errors that name the rank, the operation and missing ranks.

torch's errors name a socket at most. A rank with such an error runs a health check over the rendezvous
store and names the ranks that did not answer. If torch would wait for that store forever, a timer ends the
process. No code catches the CommunicationError, so it ends the process.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

# The longest time of a health check in seconds; a shorter time-out replaces it.
LONGEST_CHECK = 3.0
# Seconds to wait longer for a store that hangs. Rank 0 may run the store, so it exits this much later.
GRACE_SECONDS = 1.0
# Seconds beyond the time-out for an operation at start: the margin of `agree` and a health check.
WATCH_SECONDS = 16.0
LONGEST_SECONDS = 365 * 24 * 3600
PRESENT = "fairseq_tutel/health_check"
# Texts in gloo's errors, which are plain RuntimeErrors. The last text is from a file store.
MARKS = ("gloo/transport", "gloo/rendezvous", "Gloo connectFullMesh failed", "Wait timeout")


class CommunicationError(RuntimeError):
    """A collective failed; the message names the rank, the operation and missing ranks."""


_timeout: timedelta | None = None


def is_time(seconds: Any) -> bool:
    """Return whether a time-out is valid: whole seconds, at most a year, or 0 for torch's default."""
    return type(seconds) is int and 0 <= seconds <= LONGEST_SECONDS


def set_timeout(seconds: int) -> None:
    """Set the time-out of collectives for groups created from now on; 0 keeps torch's default."""
    if not is_time(seconds):
        raise ValueError(
            f"--moe-comm-timeout is {seconds!r}; give whole seconds from 1 to {LONGEST_SECONDS} (a "
            "year), or 0 for torch's default."
        )
    global _timeout
    _timeout = timedelta(seconds=seconds) if seconds else None


def timeout_of_groups() -> timedelta | None:
    """Return the time-out for new groups that `set_timeout` has set; None means torch's default."""
    return _timeout


def limit(group: dist.ProcessGroup | None) -> None:
    """Apply the time-out of `set_timeout` to an existing group; None means the default group."""
    if _timeout:
        distributed_c10d._set_pg_timeout(_timeout, group)


class guarded:  # noqa: N801 - a context manager
    """Context manager that converts a failed collective to a CommunicationError with an explanation.

    Usage: `with guarded("the exchange of …", group): collective`. Other errors, and errors that an inner
    guard has explained, are not changed. `operation` completes "rank 1 could not finish …". `timed` is
    False if the block also does other work.
    """

    __slots__ = ("group", "operation", "start", "timed")

    def __init__(self, operation: str, group: dist.ProcessGroup | None = None, timed: bool = True) -> None:
        self.operation, self.group, self.timed = operation, group, timed

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_of_communication(error):
            after = f" and gave up after {time.perf_counter() - self.start:.1f} s" if self.timed else ""
            what = f"could not finish {self.operation}{after}"
            raise CommunicationError(_explain(what, self.group)) from error


@contextlib.contextmanager
def watched(operation: str, rank: int | None = None) -> Iterator[None]:
    """Context manager that ends this process if torch waits forever for the rendezvous store.

    A store's client has a time-out for missing keys, but not for a store whose process is stopped. No
    exception reaches a thread that waits for such a store. Give `rank` if this process is in no group yet.
    """
    timeout = timeout_of_groups() or distributed_c10d.default_pg_timeout
    seconds = timeout.total_seconds() + WATCH_SECONDS
    watch = threading.Timer(seconds, _end, (operation, rank, seconds))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _end(operation: str, rank: int | None, seconds: float) -> None:
    rank = dist.get_rank() if rank is None else rank
    what = f"rank {rank} could not finish {operation} and gave up after {seconds:.0f} s"
    name = f"{CommunicationError.__module__}.{CommunicationError.__name__}"
    print(f"{name}: {what}: {_no_store()}", file=sys.stderr, flush=True)
    os._exit(1)


def is_of_communication(error: BaseException) -> bool:
    """Return whether torch raised this error because communication with another rank failed.

    Errors that a guard has already explained do not count.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in MARKS)


def absent(store: dist.Store, prefix: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have no key `prefix/rank` in the store, with few requests by bisection."""
    if not ranks or store.check([f"{prefix}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return absent(store, prefix, ranks[:middle]) + absent(store, prefix, ranks[middle:])


def wait_for(store: dist.Store, prefix: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait at most `seconds` until each rank has a key `prefix/rank`; return the ranks without a key."""
    deadline, pause = time.monotonic() + seconds, 0.05
    keys = [f"{prefix}/{rank}" for rank in ranks]
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return absent(store, prefix, ranks)
        time.sleep(min(pause, left))
        pause *= 2  # thousands of ranks may poll
    return []


def name_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "rank 3" or "ranks 0-2, 5" for ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def how_to_wait_longer(seconds: float) -> str:
    """Return advice to raise the time-out; `seconds` is its current value, 0 for torch's default."""
    if seconds:
        return f"raise --moe-comm-timeout (now {seconds:g})"
    return "set --moe-comm-timeout above torch's default"


def keeps_the_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher, not rank 0, runs the rendezvous store.

    A launcher may restart ranks with the same store.
    """
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _no_store() -> str:
    keeper = "the launcher" if keeps_the_store() else "rank 0"
    return (
        f"see {keeper}'s error above or in its log; it runs the rendezvous store, which does not answer, "
        "so it has ended or is stopped."
    )


def _explain(what: str, group: dist.ProcessGroup | None) -> str:
    rank = dist.get_rank()
    members = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    seconds = _timeout.total_seconds() if _timeout else 0
    wait = min(seconds or LONGEST_CHECK, LONGEST_CHECK)
    start = f"rank {rank} {what}: "
    # A launcher may end this rank before the health check ends.
    logger.error("%srunning a health check of all ranks for up to %g s", start, wait)
    missing = _check_health(rank, sorted(members), wait)
    longer = how_to_wait_longer(seconds)
    if missing is None:
        return start + _no_store()
    if not missing:
        return (
            f"{start}{name_ranks(sorted(members))} all answered a health check, so a connection broke or "
            f"one rank was late; look for the first error in their logs, or {longer} if a rank is only "
            "slow."
        )
    name = name_ranks(missing)
    return (
        f"{start}{name} did not answer a health check of {wait:g} s; look at the log of {name} "
        f"for the reason, or {longer} if it is only slow."
    )


def _check_health(rank: int, ranks: list[int], seconds: float) -> list[int] | None:
    """Run a health check of some ranks; return the missing ranks, or None if the store does not answer."""
    missing: list[list[int]] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            store = distributed_c10d._get_default_store()
            missing.append(_missing(store, rank, ranks, seconds))

    # Calls to a store whose process is stopped never return.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds + GRACE_SECONDS)
    if rank == 0:
        time.sleep(GRACE_SECONDS)  # others may still read from this process
    return missing[0] if missing else None


def _missing(store: dist.Store, rank: int, ranks: list[int], seconds: float) -> list[int]:
    """Mark this rank as present in the store, wait for the other ranks, and return the missing ranks.

    The first rank checks all ranks and publishes the missing ones. The others check only those again, so W
    ranks do not request W keys each. If the first rank ends before that, a second rank checks. If that
    ends, too, this raises a DistStoreError. A failed job does not continue, so one set of keys suffices.
    """
    deadline, answers = time.monotonic() + seconds, f"{PRESENT}/of/{hash(tuple(ranks))}"
    store.set(f"{PRESENT}/{rank}", "here")

    def look() -> list[int]:
        missing = wait_for(store, PRESENT, ranks, max(0.0, deadline - time.monotonic()))
        store.set(f"{answers}/missing", json.dumps(missing))
        return missing

    if store.add(f"{answers}/first", 1) == 1:
        return look()
    try:
        store.wait([f"{answers}/missing"], timedelta(seconds=seconds + GRACE_SECONDS / 4))
    except dist.DistStoreError:
        if store.add(f"{answers}/second", 1) == 1:
            return look()
        store.wait([f"{answers}/missing"], timedelta(seconds=GRACE_SECONDS / 2))
    doubtful = json.loads(store.get(f"{answers}/missing"))
    return wait_for(store, PRESENT, doubtful, max(0.0, deadline - time.monotonic()))
