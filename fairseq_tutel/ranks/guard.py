"""Guard: one rank's death ends the job; a collective that fails says where, in what, and who is missing.

torch's own error names a socket at most. After one, every rank that met it answers a roll call over the
store by which the ranks found each other, and names those that did not answer. Where torch would wait for
that store for ever, a watch ends the process.

The way of it: a rank ends, or does not come within `set_timeout` (--moe-comm-timeout, by `plugin.startup`;
groups take it in `groups`); torch raises in a collective of the others, which `guarded` surrounds in
`comm.collectives` and `world`, and for fairseq's own in `plugin.registration.wrapped` and
`plugin.training.task`; the CommunicationError passes through all else, and the process ends by it. Nobody
catches one. Ranks that meet are watched in `rendezvous`, those that compare their options in `agreement`.
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

# Or the time-out, where that is shorter.
LONGEST_ROLL_CALL = 3.0
# What may come on top: a store that hangs is given up, and the rank that keeps it leaves last.
GRACE_SECONDS = 1.0
# What an operation at start may take beyond the time-out: the margin of an agreement, and a roll call.
WATCH_SECONDS = 16.0
LONGEST_SECONDS = 365 * 24 * 3600
ROLL = "fairseq_tutel/roll_call"
# gloo raises plain RuntimeErrors; these name its source file. The last is a file store's.
MARKS = ("gloo/transport", "gloo/rendezvous", "Gloo connectFullMesh failed", "Wait timeout")


class CommunicationError(RuntimeError):
    """A collective failed; the message names the rank, the operation and who is missing."""


_timeout: list[timedelta] = []


def is_time(seconds: Any) -> bool:
    """Whether this can be a time-out: whole seconds, at most a year, or 0 for torch's own."""
    return type(seconds) is int and 0 <= seconds <= LONGEST_SECONDS


def set_timeout(seconds: int) -> None:
    """Set how long a collective of groups that are made from now on may wait for a rank.

    Args:
        seconds: of each collective; 0 leaves torch's own, 30 minutes (10 under NCCL).

    Raises:
        ValueError: no whole number from 0 to a year's.
    """
    if not is_time(seconds):
        raise ValueError(
            f"--moe-comm-timeout is {seconds!r}; give whole seconds from 1 to {LONGEST_SECONDS} (a "
            "year), or 0 for torch's own limits."
        )
    _timeout[:] = [timedelta(seconds=seconds)] if seconds else []


def timeout_of_groups() -> timedelta | None:
    """Return what `set_timeout` set, as new_group's `timeout`; None for torch's own."""
    return _timeout[0] if _timeout else None


def limit(group: dist.ProcessGroup | None) -> None:
    """Give a group that exists (None: the default one) the time-out that `set_timeout` set."""
    if _timeout:
        distributed_c10d._set_pg_timeout(_timeout[0], group)


class guarded:  # noqa: N801 - reads as a sentence at its use
    """`with guarded("the exchange of …", group): collective`: a failure names who is missing.

    Costs a microsecond where nothing fails. Errors that are not of communication pass unchanged, and so
    does what an inner guard has explained.

    Args:
        operation: ends the sentence "rank 1 could not finish …".
        group: whose ranks are called; None for all.
        timed: say how long it took; not where much else is done within.

    Raises:
        CommunicationError: the collective failed for want of another rank.
    """

    __slots__ = ("group", "operation", "start", "timed")

    def __init__(
        self, operation: str, group: dist.ProcessGroup | None = None, timed: bool = True
    ) -> None:
        self.operation, self.group, self.timed = operation, group, timed

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_of_communication(error):
            after = (
                f" and gave up after {time.perf_counter() - self.start:.1f} s" if self.timed else ""
            )
            what = f"could not finish {self.operation}{after}"
            raise CommunicationError(_explain(what, self.group)) from error


@contextlib.contextmanager
def watched(operation: str, rank: int | None = None) -> Iterator[None]:
    """End this process where torch waits in the block for a store for ever, with a sentence.

    A store's client has a time-out for what others did not write yet, and none for a store whose process
    is stopped. No exception reaches a thread that waits in there.

    Args:
        operation: as `guarded` takes it.
        rank: of this process, where it is in no group yet.
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
    """Whether torch raised this for want of another rank, and no guard has explained it yet."""
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in MARKS)


def absent(store: dist.Store, prefix: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks without a key `prefix/rank` in the store, by halving: few requests for many."""
    if not ranks or store.check([f"{prefix}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return absent(store, prefix, ranks[:middle]) + absent(store, prefix, ranks[middle:])


def wait_for(store: dist.Store, prefix: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until each rank has a key `prefix/rank`, `seconds` at most; return those without one."""
    deadline, pause = time.monotonic() + seconds, 0.05
    keys = [f"{prefix}/{rank}" for rank in ranks]
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return absent(store, prefix, ranks)
        time.sleep(min(pause, left))
        pause *= 2  # thousands of ranks may ask
    return []


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5" for several, which are in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def how_to_wait_longer(seconds: float) -> str:
    """Say what to do where ranks waited so long for a slow one; 0 for as long as torch lets them."""
    if seconds:
        return f"raise --moe-comm-timeout (now {seconds:g})"
    return "give --moe-comm-timeout beyond torch's own limits"


def keeps_the_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the store by which ranks find each other is the launcher's, and not rank 0's.

    The launcher may then start ranks again beside it, also where it allows no restart after a failure:
    torchrun starts all ranks again when a node joins.
    """
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _no_store() -> str:
    keeper = "the launcher" if keeps_the_store() else "rank 0"
    return (
        f"see {keeper}'s error above or in its log: it keeps the store by which ranks find each other, "
        "which does not answer either, so it has ended or stopped."
    )


def _explain(what: str, group: dist.ProcessGroup | None) -> str:
    rank = dist.get_rank()
    members = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    wait = min(_timeout[0].total_seconds() if _timeout else LONGEST_ROLL_CALL, LONGEST_ROLL_CALL)
    start = f"rank {rank} {what}: "
    # A launcher that sees a rank end may end this one before the roll is called.
    logger.error("%scalling the roll for up to %g s", start, wait)
    missing = _call_the_roll(rank, sorted(members), wait)
    longer = how_to_wait_longer(_timeout[0].total_seconds() if _timeout else 0)
    if missing is None:
        return start + _no_store()
    if not missing:
        return (
            f"{start}{name_ranks(sorted(members))} all answered a roll call, so a connection broke or "
            f"one of them was late; look for the first error in their logs, or {longer} where one is "
            "only slow."
        )
    name = name_ranks(missing)
    return (
        f"{start}{name} did not answer a roll call of {wait:g} s; look at the log of {name} "
        f"for what ended or stopped it, or {longer} where it is only slow."
    )


def _call_the_roll(rank: int, ranks: list[int], seconds: float) -> list[int] | None:
    """Answer and wait for the others; return who did not answer, or None without a store."""
    missing: list[list[int]] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            store = distributed_c10d._get_default_store()
            missing.append(_missing(store, rank, ranks, seconds))

    # A stopped process that keeps the store would hold its callers for ever.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds + GRACE_SECONDS)
    if rank == 0:
        time.sleep(GRACE_SECONDS)  # others may be about to read from this process
    return missing[0] if missing else None


def _missing(store: dist.Store, rank: int, ranks: list[int], seconds: float) -> list[int]:
    """Answer, wait, and return who did not answer.

    The first rank that comes looks for all and tells the others, which look for those alone that it
    missed: a store must not be asked for W keys by W ranks. Where the first has ended before it told, one
    other looks. A failed job is not gone on with, so that the keys of one roll call serve.

    Raises:
        DistStoreError: nobody told.
    """
    deadline, answers = time.monotonic() + seconds, f"{ROLL}/of/{hash(tuple(ranks))}"
    store.set(f"{ROLL}/{rank}", "here")

    def look() -> list[int]:
        missing = wait_for(store, ROLL, ranks, max(0.0, deadline - time.monotonic()))
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
    return wait_for(store, ROLL, doubtful, max(0.0, deadline - time.monotonic()))
