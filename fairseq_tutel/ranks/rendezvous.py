"""Rendezvous: ranks find each other within the time-out, also where torchrun starts them again.

torch waits half an hour for a rank that died before it came, and names nobody: `meeting` does.

torchrun keeps one store as long as it lives. Ranks of a later start find the addresses of dead ones in it,
and end at once (pytorch/pytorch issue 167288). Under `METHOD` rank 0 draws a name for each start, under
which all of it happens, and learns from each rank's answer that it was not an earlier one that asked.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    DistStoreError,
    PrefixStore,
    Store,
    constants,
    distributed_c10d,
    rendezvous,
)
from torch.distributed.rendezvous import register_rendezvous_handler

from fairseq_tutel.ranks.guard import (
    CommunicationError,
    absent,
    how_to_wait_longer,
    is_of_communication,
    watched,
)

# Where torch keeps what `init_process_group` waits for without a `timeout`.
DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
SCHEME = "restarted"
# For init_process_group, instead of env://.
METHOD = f"{SCHEME}://"
PREFIX = "fairseq_tutel/start"
# How long rank 0 waits for an answer to be taken before it looks who has asked anew.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 1.0


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """Return L from torchrun, OpenMPI or Slurm, or 0 where none of them says it.

    Slurm's SLURM_NTASKS_PER_NODE may be "8" or "8(x4)"; nodes of different sizes ("8,4") give 0.
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        found = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get(name, ""))
        if found:
            return int(found[1])
    return 0


def own_gpu(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process's GPU among those that it sees, which may be its own alone."""
    return int(environment.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


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


def fresh(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the part of a store that this start of the ranks has to itself. Every rank calls it.

    Args:
        store: in which earlier starts may have left anything.
        rank: of this process.
        world_size: W, of this start.
        timeout: how long to wait for the others.

    Raises:
        DistStoreError: a rank did not come.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    name = _welcome(store, world_size, deadline) if rank == 0 else _ask(store, rank, deadline)
    return PrefixStore(f"{PREFIX}/{name}", store)


def _welcome(store: Store, world_size: int, deadline: float) -> str:
    """Tell every rank the name of this start, until each has it."""
    name, waiting = uuid.uuid4().hex, list(range(1, world_size))
    told: dict[int, str] = {}
    pause = SHORTEST_SECONDS
    if waiting and not _wait(store, [f"{PREFIX}/asker/{rank}" for rank in waiting], deadline):
        waiting = absent(store, f"{PREFIX}/asker", waiting)
        raise DistStoreError(f"{world_size - len(waiting)}/{world_size} ranks came")
    while waiting:
        for rank in waiting:
            asker = store.get(f"{PREFIX}/asker/{rank}").decode()
            if told.get(rank) != asker:
                told[rank] = asker
                store.set(f"{PREFIX}/answer/{asker}", name)
        # An answer to an earlier start's asker is not taken: whoever is to take it will ask again.
        taken = [f"{PREFIX}/taken/{name}/{rank}" for rank in waiting]
        if _wait(store, taken, min(deadline, time.monotonic() + pause)):
            break
        waiting = absent(store, f"{PREFIX}/taken/{name}", waiting)
        if time.monotonic() > deadline:
            raise DistStoreError(f"{world_size - len(waiting)}/{world_size} ranks came")
        pause = min(2 * pause, LONGEST_SECONDS)
    for rank in range(1, world_size):  # so that the next start need not look for newer ones
        store.delete_key(f"{PREFIX}/asker/{rank}")
    return name


def _ask(store: Store, rank: int, deadline: float) -> str:
    """Return the name that rank 0 gave to this very process."""
    me = uuid.uuid4().hex
    store.set(f"{PREFIX}/asker/{rank}", me)
    if not _wait(store, [f"{PREFIX}/answer/{me}"], deadline):
        raise DistStoreError("rank 0 did not answer, or waits for another rank")
    name = store.get(f"{PREFIX}/answer/{me}").decode()
    store.set(f"{PREFIX}/taken/{name}/{rank}", "taken")
    return name


def _wait(store: Store, keys: list[str], deadline: float) -> bool:
    """Wait until all keys are there, without asking again and again; whether they came in time."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except DistStoreError:
        return False
    return True


def _rendezvous(
    url: str, timeout: timedelta = constants.default_pg_timeout, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Meet as env:// does, in a part of the store that no earlier start has written to."""
    of_torch = "env" + url.removeprefix(SCHEME)
    store, rank, world_size = next(rendezvous(of_torch, timeout=timeout, **options))
    yield fresh(store, rank, world_size, timeout), rank, world_size
    raise RuntimeError(f"ranks that met by {METHOD} cannot meet again without a launcher")


register_rendezvous_handler(SCHEME, _rendezvous)
