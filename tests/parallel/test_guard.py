"""A collective that fails names its rank, its operation and who is missing, in a bounded time."""

import time

import mortal
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.gradients import mark_expert, reduce_expert_gradients
from fairseq_tutel.parallel.groups import make_topology
from fairseq_tutel.parallel.guard import CommunicationError, guarded

OPERATION = "the all-reduce of a test"
TIMEOUT = 1  # and of the health check


def _reduce(rank, fate, victim):
    """All-reduce on a group with a time-out; the victim meets its fate first."""
    guard.set_timeout(TIMEOUT)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    dist.all_reduce(torch.ones(3), group=group)
    if rank == victim:
        fate()
    with guarded(OPERATION, group):
        dist.all_reduce(torch.ones(3), group=group)
    return "fine"


@pytest.mark.parametrize(("fate", "at_least"), [(mortal.die, 0), (mortal.stop, TIMEOUT)])
def test_a_dead_or_stopped_rank_is_named_by_all_others(fate, at_least):
    said, seconds = mortal.run(_reduce, 3, [0, 2], fate, 1)
    for rank, sentence in zip((0, 2), said, strict=True):
        start = f"CommunicationError: rank {rank} could not finish {OPERATION}: "
        assert sentence.startswith(f"{start}rank 1 did not answer a health check of 1 s; look at")
        assert "raise --moe-comm-timeout (now 1) if it is only slow" in sentence
    assert seconds < at_least + TIMEOUT + 2 * guard.GRACE_SECONDS + 4


@pytest.mark.parametrize("fate", [pytest.param(mortal.die, marks=pytest.mark.long), mortal.stop])
def test_without_the_rank_that_keeps_the_store_the_sentence_says_so(fate):
    (sentence,), seconds = mortal.run(_reduce, 2, [1], fate, 0)
    assert f"rank 1 could not finish {OPERATION}" in sentence
    assert ": rank 0, which runs the rendezvous store, has ended or is stopped" in sentence
    assert seconds < 2 * TIMEOUT + guard.GRACE_SECONDS + 4


def _unequal_calls(rank):
    guard.set_timeout(TIMEOUT)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    with guarded(OPERATION, group):
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.recv(torch.ones(1), src=0, group=group)


def test_ranks_in_different_operations_all_answer():
    said, _ = mortal.run(_unequal_calls, 2, [0, 1])
    for sentence in said:
        assert "ranks 0-1 answered a health check or ended during it, so a connection broke" in sentence


def _expert_gradients(rank):
    guard.set_timeout(TIMEOUT)
    topology = make_topology([2])
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    mark_expert(parameter)
    if rank == 2:
        mortal.die()
    reduce_expert_gradients([parameter], topology)
    return "fine"


def test_only_ranks_of_the_group_are_called():
    said, _ = mortal.run(_expert_gradients, 4, [0, 1, 3])
    assert said[1] == said[2] == "fine"  # replicas of each other
    assert "rank 0 could not finish the all-reduce of expert gradients" in said[0]
    assert ": rank 2 did not answer" in said[0]


def _timeouts():
    """Return the seconds that each group waits, by gloo's own word."""
    guard.set_timeout(7)
    made = make_topology([2], 0, 0)
    guard.limit(None)
    seconds = []
    for group in (made.expert_group, None):
        group = group or dist.group.WORLD
        options = group._get_backend(torch.device("cpu")).options
        seconds.append(options._timeout.total_seconds())
    guard.set_timeout(0)
    return seconds, guard.timeout_of_groups()


def test_groups_made_later_and_limited_ones_take_the_time_out(ranks):
    ranks(2).close()  # groups of earlier tests have torch's own
    for seconds, none in ranks(2).run(_timeouts):
        assert seconds == [7, 7]
        assert none is None
    ranks(2).close()


@pytest.mark.parametrize("bad", [-1, 1.5, "10", True, 10**9])
def test_a_time_that_is_none_is_refused(bad):
    before = guard.timeout_of_groups()
    with pytest.raises(ValueError, match=r"^--moe-comm-timeout is .*; give whole seconds from 1 to "):
        guard.set_timeout(bad)
    assert guard.timeout_of_groups() == before


def test_other_errors_and_explained_ones_pass_unchanged():
    for error in (
        ValueError("Connection closed by peer"),
        RuntimeError("Split sizes doesn't match total dim 0 size"),
        CommunicationError("rank 0 … gloo/transport"),
    ):
        with pytest.raises(type(error)) as caught, guarded(OPERATION):
            raise error
        assert caught.value is error


def test_errors_of_torch_s_back_ends_are_known():
    for error in (
        dist.DistBackendError("NCCL error in: …, remote process exited or there was a network error"),
        dist.DistStoreError("wait timeout after 2000ms, keys: /default_pg/0//2//cpu//0/1"),
        RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ):
        assert guard.is_of_communication(error)


class _CountingStore(dist.HashStore):
    checks, keys = 0, 0

    def check(self, keys):
        self.checks += 1
        self.keys += len(keys)
        return super().check(keys)


def test_few_requests_find_who_is_missing_among_thousands():
    store = _CountingStore()
    for rank in range(4096):
        if rank not in (7, 4000):
            store.set(f"roll/{rank}", "here")
    assert guard.wait_for(store, "roll", range(4096), seconds=0.1) == [7, 4000]
    assert store.checks < 64


def test_one_rank_looks_for_all_others_and_its_verdict_holds():
    store, world, victims = _CountingStore(), 256, [7, 200]
    for rank in range(1, world):  # all but the first, which looks, have come
        if rank not in victims:
            store.set(f"{guard.PRESENT}/{rank}", "here")
    alive = [rank for rank in range(world) if rank not in victims]
    said = {guard._checked(store, rank, range(world), 0.1, "wait") for rank in alive[:9]}
    assert len(said) == 1 and said.pop().startswith("ranks 7, 200 did not answer a health check of 0.1 s")
    assert store.keys < 9 * world  # each of them would look for all at least thrice


def test_a_guard_costs_next_to_nothing():
    best = min(_seconds_of(1000) for _ in range(20))
    assert best / 1000 < 5e-6


def _seconds_of(times):
    start = time.perf_counter()
    for _ in range(times):
        with guarded(OPERATION):
            pass
    return time.perf_counter() - start
