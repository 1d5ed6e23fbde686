"""If ranks are missing or the store never answers, a start ends in limited time with a clear error."""

import os
import threading
import time
from datetime import timedelta

import forkserver
import pytest
import torch.distributed as dist
from ports import free_port
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel import rendezvous
from fairseq_tutel.parallel.guard import CommunicationError


def _torch_s():
    return [getattr(distributed_c10d, name) for name in rendezvous.DEFAULTS]


def test_the_wait_for_a_missing_rank_ends_after_the_given_time_out():
    rank, before, start = 0, _torch_s(), time.monotonic()
    with pytest.raises(CommunicationError) as caught, rendezvous.meeting(rank, 2, 1):
        address = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    assert time.monotonic() - start < 15  # torch's TCP store client retries for longer than its time-out.
    sentence = str(caught.value)
    assert sentence.startswith(f"rank {rank} could not find the other ranks of 2 and gave up after ")
    assert "raise --moe-comm-timeout if they are only slow to start" in sentence
    assert _torch_s() == before


def _hangs(has_store, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    dist.is_initialized = lambda: has_store
    rendezvous.WATCH_SECONDS = 0.5
    with rendezvous.meeting(3, 4, 1):
        time.sleep(60)


@pytest.mark.parametrize(
    ("has_store", "reason"),
    [(False, "rank 0, which"), (True, "a rank, its GPU or the network hangs")],
)
def test_a_rendezvous_that_hangs_ends_in_limited_time(has_store, reason, tmp_path):
    process = forkserver.context().Process(target=_hangs, args=(has_store, tmp_path / "log"))
    process.start()
    process.join(30)
    assert process.exitcode == 1
    start = "error: rank 3 could not finish the rendezvous within 2 s: "
    assert (tmp_path / "log").read_text().startswith(f"{start}{reason}")


SECONDS = timedelta(seconds=10)


def _started(store, world_size, members=None, timeout=SECONDS):
    """Run the rendezvous in one thread per rank, and return the store or error of each rank."""
    got = {}

    def meet(rank):
        try:
            got[rank] = rendezvous.fresh(store, rank, world_size, timeout)
        except dist.DistError as error:
            got[rank] = error

    ranks = range(world_size) if members is None else members
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def _is_common_and_empty(stores):
    """Return whether all ranks use one store that was empty at first."""
    new = not any(store.check(["address"]) for store in stores.values())
    stores[0].set("address", "here")
    return new and all(store.check(["address"]) for store in stores.values())


def test_every_start_of_a_run_uses_different_store_keys():
    store = dist.HashStore()
    for world_size in (3, 3, 2, 1):
        assert _is_common_and_empty(_started(store, world_size)), world_size


def test_a_start_deletes_store_keys_that_an_nccl_error_left_in_an_earlier_start():
    kept = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for key in ("exception_dump", "remote_error"):
        kept.set(key, "1")
    started = _started(kept, 1)
    started[0].set("exception_dump", "of this start")
    assert kept.num_keys() and not kept.check(["exception_dump"]) and not kept.check(["remote_error"])


def test_a_start_does_not_use_store_keys_of_an_incomplete_start():
    store, short = dist.HashStore(), timedelta(seconds=0.2)
    for members in ([0, 2], [1, 2]):
        got = _started(store, 3, members, short)
        assert isinstance(got[members[0]], dist.DistStoreError), members
        assert _is_common_and_empty(_started(store, 3)), members


def test_a_start_with_missing_ranks_ends_within_its_time_out():
    got = _started(dist.HashStore(), 3, [0, 2], timedelta(seconds=5 * rendezvous.PAUSE_SECONDS))
    assert str(got[0]) == "rank 1 did not arrive"
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
def test_the_number_of_ranks_per_node_is_read_from_the_launcher(environment, expected):
    assert rendezvous.ranks_per_node(environment) == expected
