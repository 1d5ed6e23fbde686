"""A failed collective soon ends with an error that names the rank, the operation and the missing ranks."""

import mortal
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.guard import CommunicationError, guarded

OPERATION = "the all-reduce of a test"
TIMEOUT = 1  # Collectives and the health check have this time-out in seconds.


def _group():
    """Return a process group whose collectives have the time-out of this file."""
    guard.set_timeout(TIMEOUT)
    guard.limit(None)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    for each in (group, dist.group.WORLD):
        assert each._get_backend(torch.device("cpu")).options._timeout.total_seconds() == TIMEOUT
    return group


def _reduce(rank, fate, victim):
    """Run an all-reduce with a time-out, after rank `victim` has died or stopped."""
    group = _group()
    dist.all_reduce(torch.ones(3), group=group)
    if rank == victim:
        fate()
    with guarded(OPERATION, group):
        dist.all_reduce(torch.ones(3), group=group)
    return "fine"


@pytest.mark.parametrize(("fate", "at_least"), [(mortal.die, 0), (mortal.stop, TIMEOUT)])
def test_errors_on_all_other_ranks_name_a_dead_or_stopped_rank(fate, at_least):
    said, seconds = mortal.run(_reduce, 3, [0, 2], fate, 1)
    for rank, sentence in zip((0, 2), said, strict=True):
        start = f"CommunicationError: rank {rank} could not finish {OPERATION}: "
        assert sentence.startswith(f"{start}rank 1 did not answer a health check of 1 s; look at")
    assert seconds < at_least + TIMEOUT + 2 * guard.GRACE_SECONDS + 4


def test_errors_name_a_stopped_rank_that_runs_the_rendezvous_store():
    (sentence,), seconds = mortal.run(_reduce, 2, [1], mortal.stop, 0)
    assert f"rank 1 could not finish {OPERATION}" in sentence
    assert ": rank 0, which runs the rendezvous store, has ended or is stopped" in sentence
    assert seconds < 2 * TIMEOUT + guard.GRACE_SECONDS + 4


def _unequal_calls(rank):
    group = _group()
    with guarded(OPERATION, group):
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.recv(torch.ones(1), src=0, group=group)


def test_ranks_in_different_operations_all_answer_the_health_check():
    said, _ = mortal.run(_unequal_calls, 2, [0, 1])
    for sentence in said:
        assert "ranks 0-1 answered a health check or ended during it, so a connection broke" in sentence


def test_the_guard_does_not_replace_other_errors_or_explained_errors():
    for error in (
        ValueError("Connection closed by peer"),
        RuntimeError("Split sizes doesn't match total dim 0 size"),
        CommunicationError("rank 0 … gloo/transport"),
    ):
        with pytest.raises(type(error)) as caught, guarded(OPERATION):
            raise error
        assert caught.value is error


def test_communication_errors_of_torchs_back_ends_are_recognized():
    for error in (
        dist.DistBackendError("NCCL error in: …, remote process exited or there was a network error"),
        dist.DistStoreError("wait timeout after 2000ms, keys: /default_pg/0//2//cpu//0/1"),
        RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ):
        assert guard.is_of_communication(error)
