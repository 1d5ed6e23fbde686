"""Ranks that are started again with the same store meet each other, and none of those before.

Covered: several starts of as many and of fewer ranks; what a start left that broke off; a rank that does
not come, and rank 0; when it is needed.
"""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from fairseq_tutel.ranks import restart

SECONDS = timedelta(seconds=10)


def _start(store, world_size, who=None, timeout=SECONDS):
    """Let ranks meet, each in a thread; return by rank what it got: a store, or an error."""
    got = {}

    def meet(rank):
        try:
            got[rank] = restart.fresh(store, rank, world_size, timeout)
        except dist.DistError as error:
            got[rank] = error

    ranks = range(world_size) if who is None else who
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def _is_common_and_empty(stores):
    """Whether all ranks see what one of them writes, in a place where nothing was."""
    new = not any(store.check(["address"]) for store in stores.values())
    stores[0].set("address", "here")
    return new and all(store.check(["address"]) for store in stores.values())


def test_every_start_has_a_place_of_its_own():
    store = dist.HashStore()
    for world_size in (3, 3, 2, 1, 4):
        assert _is_common_and_empty(_start(store, world_size)), world_size


class _CountingStore(dist.HashStore):
    asked = 0

    def check(self, keys):
        self.asked += 1
        return super().check(keys)

    def wait(self, keys, timeout):
        self.asked += 1
        return super().wait(keys, timeout)


def test_waiting_for_a_late_rank_asks_the_store_nothing():
    store, late = _CountingStore(), threading.Event()
    thread = threading.Timer(0.5, lambda: (late.set(), restart.fresh(store, 1, 3, SECONDS)))
    thread.start()
    got = _start(store, 3, [0, 2])
    thread.join()
    assert late.is_set() and all(isinstance(one, dist.Store) for one in got.values())
    assert store.asked <= 8


def test_what_a_start_left_that_broke_off_deceives_nobody():
    store, short = dist.HashStore(), timedelta(seconds=0.2)
    for who in ([0, 2], [1, 2], [0], [2]):
        got = _start(store, 3, who, short)
        assert isinstance(got[who[0]], dist.DistStoreError), who
        assert _is_common_and_empty(_start(store, 3)), who


def test_who_does_not_come_is_said_in_time():
    got = _start(dist.HashStore(), 3, [0, 2], timedelta(seconds=0.2))
    assert str(got[0]) == "2/3 ranks came"
    got = _start(dist.HashStore(), 2, [1], timedelta(seconds=0.2))
    assert str(got[1]) == "rank 0 did not answer, or waits for another rank"


@pytest.mark.parametrize(
    ("keeps_the_store", "restarts", "may"),
    [("True", "2", True), ("True", "0", True), ("False", "2", False), (None, None, False)],
)
def test_it_is_for_launchers_that_keep_the_store_whatever_restarts_after_failures_they_allow(
    keeps_the_store, restarts, may, monkeypatch
):
    given = {"USE_AGENT_STORE": keeps_the_store, "MAX_RESTARTS": restarts}
    for name, value in given.items():
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert restart.may_happen() == may
