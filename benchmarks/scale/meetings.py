"""Ranks that find each other: the health check after a failure, and the rendezvous of restarted ranks."""

import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from benchmarks.output import Row
from benchmarks.scale import swarm
from fairseq_tutel.parallel import guard, rendezvous

WORLDS = (64, 256, 512)  # threads of more wait for each other, and no longer for the store
LATE_SECONDS = 2.0  # by which the last rank comes after the others
LIMIT = timedelta(seconds=120)


def health_checks(quick: bool) -> Iterator[Row]:
    """Yield a health check of ranks that are all alive, so that each missing one is an error."""
    for world in (8,) if quick else WORLDS:

        def call(store: dist.Store, rank: int, world: int = world) -> bool:
            found = guard._checked(store, rank, range(world), guard.LONGEST_CHECK)
            return "did not answer" not in found

        found = swarm.run(world, call)
        yield _row(world, found) | {"accusers": found["wrong"]}


def restarts(quick: bool) -> Iterator[Row]:
    """Yield the meeting of ranks that are started again, of which one comes late."""
    for world in (8,) if quick else WORLDS:

        def meet(store: dist.Store, rank: int, world: int = world) -> bool:
            if rank == world - 1:
                time.sleep(0.1 if quick else LATE_SECONDS)
            rendezvous.fresh(store, rank, world, LIMIT)
            return True

        yield _row(world, swarm.run(world, meet))


def _row(world: int, found: dict[str, float]) -> Row:
    note = f"{found['requests']:,} requests, {found['keys']:,} keys"
    return {"variant": f"{world} ranks", "ranks": world, "status": "ok", "note": note, **found}
