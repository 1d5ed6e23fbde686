"""Ranks that never come, and a store that never answers, end a start-up in time and with a sentence."""

import os
import threading
import time
from datetime import timedelta

import forkserver
import pytest
import torch.distributed as dist
from ports import free_port
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel import failures, guard, rendezvous
from fairseq_tutel.parallel.guard import CommunicationError


def _torch_s():
    return [getattr(distributed_c10d, name) for name in rendezvous.DEFAULTS]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked(rank):
    before, start = _torch_s(), time.monotonic()
    with pytest.raises(CommunicationError) as caught, rendezvous.meeting(rank, 2, 1):
        address = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    assert time.monotonic() - start < 15  # torch's client tries again for longer than it was told
    sentence = str(caught.value)
    assert sentence.startswith(f"rank {rank} could not find the other ranks of 2 and gave up after ")
    assert "raise --moe-comm-timeout (now 1) if they are only slow to start" in sentence
    assert _torch_s() == before


def test_what_comes_after_the_meeting_has_torch_s_time_outs_and_errors():
    before = _torch_s()
    with pytest.raises(dist.DistStoreError), rendezvous.meeting(0, 1, 3) as met:
        assert [timeout.total_seconds() for timeout in _torch_s()] == [3, 3]
        met()
        assert _torch_s() == before
        raise dist.DistStoreError("wait timeout")


def test_no_time_leaves_torch_s_own():
    before = _torch_s()
    with pytest.raises(CommunicationError) as caught, rendezvous.meeting(0, 1, 0):
        assert _torch_s() == before
        raise dist.DistStoreError("wait timeout")
    assert "or set --moe-comm-timeout above torch's default" in str(caught.value)


def _wait(seconds, has_store, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    dist.is_initialized = lambda: has_store
    guard.set_timeout(1)
    guard.WATCH_SECONDS = 0.5
    with guard.watched("a test", rank=3):
        time.sleep(seconds)
    os._exit(0)


@pytest.mark.parametrize(
    ("seconds", "has_store", "code", "expected"),
    [
        (0, False, 0, ""),
        (60, False, 1, "a test within 2 s: rank 0, which runs the rendezvous store, has ended"),
        (60, True, 1, "the first collective of all ranks within 2 s: a rank, its GPU or the network hangs"),
    ],
)
def test_a_watch_ends_a_start_that_hangs_and_says_where(seconds, has_store, code, expected, tmp_path):
    args = (seconds, has_store, tmp_path / "log")
    process = forkserver.context().Process(target=_wait, args=args)
    process.start()
    process.join(30)
    assert process.exitcode == code
    said = (tmp_path / "log").read_text()
    assert said.startswith(expected and f"error: rank 3 could not finish {expected}")


SECONDS = timedelta(seconds=10)


def _started(store, world_size, who=None, timeout=SECONDS):
    """Let ranks meet, each in a thread; return by rank what it got: a store, or an error."""
    got = {}

    def meet(rank):
        try:
            got[rank] = rendezvous.fresh(store, rank, world_size, timeout)
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
        assert _is_common_and_empty(_started(store, world_size)), world_size


def test_a_start_deletes_what_an_nccl_error_of_an_earlier_start_has_left():
    kept = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for key in ("exception_dump", "remote_error"):
        kept.set(key, "1")
    started = _started(kept, 1)
    started[0].set("exception_dump", "of this start")
    assert kept.num_keys() and not kept.check(["exception_dump"]) and not kept.check(["remote_error"])


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
    thread = threading.Timer(0.5, lambda: (late.set(), rendezvous.fresh(store, 1, 3, SECONDS)))
    thread.start()
    got = _started(store, 3, [0, 2])
    thread.join()
    assert late.is_set() and all(isinstance(one, dist.Store) for one in got.values())
    assert store.asked <= 8


def test_what_a_start_left_that_broke_off_deceives_nobody():
    store, short = dist.HashStore(), timedelta(seconds=0.2)
    for who in ([0, 2], [1, 2], [0], [2]):
        got = _started(store, 3, who, short)
        assert isinstance(got[who[0]], dist.DistStoreError), who
        assert _is_common_and_empty(_started(store, 3)), who


def test_who_does_not_come_is_said_in_time():
    got = _started(dist.HashStore(), 3, [0, 2], timedelta(seconds=0.2))
    assert str(got[0]) == "2/3 ranks arrived"
    got = _started(dist.HashStore(), 2, [1], timedelta(seconds=0.2))
    assert str(got[1]) == "rank 0 did not answer, or waits for another rank"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "8,4"}, 0),
        ({}, 0),
    ],
)
def test_a_launcher_says_how_many_ranks_a_node_has(environment, expected):
    assert rendezvous.ranks_per_node(environment) == expected


@pytest.mark.parametrize(("keeps", "restarts"), [("True", "0"), ("False", "2"), (None, None)])
def test_a_launcher_keeps_the_store_whatever_restarts_it_allows(keeps, restarts):
    given = {"USE_AGENT_STORE": keeps, "MAX_RESTARTS": restarts}
    environment = {f"TORCHELASTIC_{name}": value for name, value in given.items() if value}
    assert failures.keeps_the_store(environment) == (keeps == "True")
