"""The rendezvous of all ranks at start has a time-out, and works after torchrun restarts ranks.

torchrun keeps the same store for all restarts. With env://, restarted ranks find addresses of dead ranks in
the store and fail (pytorch/pytorch issue 167288). With `METHOD`, rank 0 draws a random name for each start.
This name prefixes all keys in the store. A start is complete when every rank has confirmed the name.
"""

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, constants, distributed_c10d, rendezvous
from torch.distributed.rendezvous import register_rendezvous_handler

from fairseq_tutel.parallel import failures, guard

# torch keeps the default time-outs of `init_process_group` in these variables.
DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
SCHEME = "restarted"
# `METHOD` is the URL for init_process_group, instead of env://.
METHOD = f"{SCHEME}://"
PREFIX = "fairseq_tutel/start"
NAME, NO_NAME = f"{PREFIX}/name", "none"
# NCCL errors leave these keys without a prefix in the store. torch's monitor would treat these keys as
# errors of the restarted ranks, and end these ranks after about 8 minutes.
LEFT_BY_NCCL = ("exception_dump", "remote_error")
# A rank that still waits ends this many seconds after the time-out, so that torch's error comes first.
WATCH_SECONDS = 16.0
# A rank waits this many seconds for the other ranks before it reads the name of the start again.
PAUSE_SECONDS = 0.2

_spawned_ranks = 0


def set_spawned_ranks(count: int) -> None:
    """Record how many ranks a process has spawned on this node, or 0 if a launcher started the ranks."""
    global _spawned_ranks
    _spawned_ranks = count


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks per node, from `set_spawned_ranks`, torchrun, OpenMPI or Slurm.

    Slurm's SLURM_NTASKS_PER_NODE may be "8" or "8(x4)". Nodes of different sizes ("8,4") give 0 (unknown).
    """
    if _spawned_ranks:
        return _spawned_ranks
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        found = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get(name, ""))
        if found:
            return int(found[1])
    return 0


def own_gpu() -> int:
    """Return the index of this process's GPU among the GPUs that are visible to the process."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0))
    return int(local_rank) % torch.cuda.device_count()


@contextlib.contextmanager
def meeting(rank: int, world_size: int, seconds: int) -> Iterator[Callable[[], None]]:
    """Context manager that explains errors of a rendezvous and limits the rendezvous to `seconds`.

    The block calls the yielded function after the rendezvous. Before that call, `seconds` is the default
    time-out of groups. 0 keeps torch's default.
    """
    start, waiting = time.perf_counter(), [True]
    with contextlib.ExitStack() as until_met:
        for name in DEFAULTS if seconds else ():
            until_met.callback(setattr, distributed_c10d, name, getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, timedelta(seconds=seconds))
        limit = distributed_c10d.default_pg_timeout.total_seconds() + WATCH_SECONDS
        watch = threading.Timer(limit, _end, (rank, limit))
        watch.daemon = True
        watch.start()
        until_met.callback(watch.cancel)
        until_met.callback(waiting.clear)
        try:
            yield until_met.close
        except RuntimeError as error:
            if not (waiting and guard.is_of_communication(error)):
                raise
            reason = str(error).partition("\n")[0].rstrip(".")
            seconds_passed = time.perf_counter() - start
            raise guard.CommunicationError(
                f"rank {rank} could not find the other ranks of {world_size} and gave up after "
                f"{seconds_passed:.1f} s ({reason}); look at the logs of rank 0 and of the missing "
                f"ranks, or {guard.WAIT_LONGER} if they are only slow to start."
            ) from error


def _end(rank: int, seconds: float) -> None:
    """End this process, because torch has no time-out for a stopped store or a hanging start of NCCL."""
    reason = failures.no_store()
    if dist.is_initialized():  # The store has answered, so another rank hangs.
        reason = "a rank, its GPU or the network hangs; look at the logs of all ranks with NCCL_DEBUG=INFO"
    failures.end_process(f"rank {rank} could not finish the rendezvous within {seconds:.0f} s: {reason}.")


def fresh(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a view of the store without keys of earlier starts of the job."""
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        for key in LEFT_BY_NCCL:
            store.delete_key(key)
        name = uuid.uuid4().hex
        store.set(NAME, name)
        if not _wait(store, [f"{PREFIX}/{name}/{other}" for other in range(1, world_size)], deadline):
            missing = guard.absent(store, f"{PREFIX}/{name}", range(1, world_size))
            raise DistStoreError(f"{guard.name_ranks(missing)} did not arrive")
        store.delete_key(NAME)
        store.set(f"{PREFIX}/{name}/complete", "yes")
        return PrefixStore(f"{PREFIX}/{name}", store)
    name = NO_NAME
    while True:
        # Unlike `get`, compare_set does not wait for the key, and returns `NO_NAME` if the key is missing.
        found = store.compare_set(NAME, NO_NAME, NO_NAME).decode()
        if found != NO_NAME:  # No rank completes a name of an earlier start, so the wait below ends first.
            name = found
            store.set(f"{PREFIX}/{name}/{rank}", "here")
        if _wait(store, [f"{PREFIX}/{name}/complete"], min(deadline, time.monotonic() + PAUSE_SECONDS)):
            return PrefixStore(f"{PREFIX}/{name}", store)
        if time.monotonic() >= deadline:
            raise DistStoreError("rank 0 did not answer, or waits for another rank")


def _wait(store: Store, keys: list[str], deadline: float) -> bool:
    """Wait for all keys without polling. Return whether all keys were set before the deadline."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except DistStoreError:
        return False
    return True


def _rendezvous(
    url: str, timeout: timedelta = constants.default_pg_timeout, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Run torch's env:// rendezvous, and return a view of the store without keys of earlier starts."""
    of_torch = "env" + url.removeprefix(SCHEME)
    store, rank, world_size = next(rendezvous(of_torch, timeout=timeout, **options))
    yield fresh(store, rank, world_size, timeout), rank, world_size
    raise RuntimeError(f"a second rendezvous with {METHOD} needs a launcher such as torchrun")


register_rendezvous_handler(SCHEME, _rendezvous)
