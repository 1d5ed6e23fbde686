"""Ranks that never come, and a store that never answers, end a start-up in time and with a sentence.

Covered: a rank, and the one that keeps the store, that does not come; torch's own time-outs before and
after; an error after the meeting; a watch that ends its process, and one that need not.
"""

import os
import sys
import time

import forkserver
import pytest
import torch.distributed as dist
from ports import free_port
from torch.distributed import distributed_c10d

from fairseq_tutel.ranks import guard, rendezvous
from fairseq_tutel.ranks.guard import CommunicationError


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
    assert sentence.startswith(
        f"rank {rank} could not meet the other ranks of 2 and gave up after "
    )
    assert "raise --moe-comm-timeout (now 1) where they are only slow to start" in sentence
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
    assert "or give --moe-comm-timeout beyond torch's own limits" in str(caught.value)


def _wait(seconds, log):
    sys.stderr = open(log, "w")  # noqa: SIM115 - open as long as the process
    guard.set_timeout(1)
    guard.WATCH_SECONDS = 0.5
    with guard.watched("a test", rank=3):
        time.sleep(seconds)
    os._exit(0)


@pytest.mark.parametrize(("seconds", "code"), [(0, 0), (60, 1)])
def test_a_watch_ends_what_waits_for_a_store_for_ever(seconds, code, tmp_path):
    process = forkserver.context().Process(target=_wait, args=(seconds, tmp_path / "log"))
    process.start()
    process.join(30)
    assert process.exitcode == code
    said = (tmp_path / "log").read_text().removeprefix("fairseq_tutel.ranks.guard.")
    assert said.startswith(
        "CommunicationError: rank 3 could not finish a test and gave up after 2 s: "
        "see rank 0's error above or in its log: it keeps the store by which ranks find each other, which "
    ) == bool(code)
