"""Restart: ranks that torchrun starts again meet where earlier ones have left nothing.

torchrun keeps one store as long as it lives. Ranks of a later start find the addresses of dead ones in it,
and end at once (pytorch/pytorch issue 167288). Here rank 0 draws a name for each start, under which all of
it happens, and learns from each rank's answer that it was not an earlier one that asked.
"""

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, constants, rendezvous
from torch.distributed.rendezvous import register_rendezvous_handler

from fairseq_tutel.ranks.guard import absent
from fairseq_tutel.ranks.launcher import keeps_the_store

SCHEME = "restarted"
# For init_process_group, instead of env://.
METHOD = f"{SCHEME}://"
PLACE = "fairseq_tutel/start"
# How long rank 0 waits for an answer to be taken before it looks who has asked anew.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 1.0


def may_happen() -> bool:
    """Whether a launcher keeps the store, and so may start ranks again beside it.

    Also where it allows no restart after a failure: torchrun starts all ranks again when a node joins.
    """
    return keeps_the_store()


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
    return PrefixStore(f"{PLACE}/{name}", store)


def _welcome(store: Store, world_size: int, deadline: float) -> str:
    """Tell every rank the name of this start, until each has it."""
    name, waiting = uuid.uuid4().hex, list(range(1, world_size))
    told: dict[int, str] = {}
    pause = SHORTEST_SECONDS
    if waiting and not _wait(store, [f"{PLACE}/asker/{rank}" for rank in waiting], deadline):
        waiting = absent(store, f"{PLACE}/asker", waiting)
        raise DistStoreError(f"{world_size - len(waiting)}/{world_size} ranks came")
    while waiting:
        for rank in waiting:
            asker = store.get(f"{PLACE}/asker/{rank}").decode()
            if told.get(rank) != asker:
                told[rank] = asker
                store.set(f"{PLACE}/answer/{asker}", name)
        # An answer to an earlier start's asker is not taken: whoever is to take it will ask again.
        taken = [f"{PLACE}/taken/{name}/{rank}" for rank in waiting]
        if _wait(store, taken, min(deadline, time.monotonic() + pause)):
            break
        waiting = absent(store, f"{PLACE}/taken/{name}", waiting)
        if time.monotonic() > deadline:
            raise DistStoreError(f"{world_size - len(waiting)}/{world_size} ranks came")
        pause = min(2 * pause, LONGEST_SECONDS)
    for rank in range(1, world_size):  # so that the next start need not look for newer ones
        store.delete_key(f"{PLACE}/asker/{rank}")
    return name


def _ask(store: Store, rank: int, deadline: float) -> str:
    """Return the name that rank 0 gave to this very process."""
    me = uuid.uuid4().hex
    store.set(f"{PLACE}/asker/{rank}", me)
    if not _wait(store, [f"{PLACE}/answer/{me}"], deadline):
        raise DistStoreError("rank 0 did not answer, or waits for another rank")
    name = store.get(f"{PLACE}/answer/{me}").decode()
    store.set(f"{PLACE}/taken/{name}/{rank}", "taken")
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
