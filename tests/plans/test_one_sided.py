"""Plans that copy through shared memory return the same bits as plans that send messages."""

import errno
import itertools
import os
import random
import time
from collections import Counter
from types import SimpleNamespace

import mortal
import plans
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.guard import guarded
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors import shared_memory
from fairseq_tutel.plans.executors.one_sided import COPY, OneSided
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.format import Writer
from fairseq_tutel.plans.generators import make

DTYPES = (torch.float64, torch.float16, torch.uint8)


def in_lanes(ranks):
    """Return an all_reduce plan with one lane per chunk, in which lane 0 sums after lane 1."""
    w = Writer(ranks)
    for rank, lane in itertools.product(range(ranks), (1, 0)):
        others = [each for each in range(ranks) if each != rank]
        for other in others:
            w.send(rank, other, ("in", lane), ("tmp", 2 * rank + lane), lane=lane, tag=lane)
        for other in others:
            w.wait(rank, other, lane=lane, tag=lane)
            w.flush(rank, other, lane=lane, tag=lane)
        if lane == 0:
            w.pend(rank, 5, lane=lane)
        places = [("in" if r == rank else "tmp", lane + 2 * r * (r != rank)) for r in range(ranks)]
        w.reduce(rank, places, ("out", lane), lane=lane)
        if lane == 1:
            w.post(rank, 5, lane=lane)
    return w.plan("lanes", "all_reduce", 2, temporary=2 * ranks)


def bytes_put(program, m, dtype):
    """Return the number of bytes that one call of a plan copies to each other rank."""
    total = Counter()
    for _, steps in program._compiled(m, 1, dtype):
        views = dict(steps.regions)
        for code, target, _ in (step for lane in steps.lanes for step in lane):
            if code == COPY and target in views and views[target][1] != program.rank:
                _, owner, _, length = views[target]
                total[program.rank, owner] += length * dtype.itemsize
    return total


def same(sizes, dtypes):
    """Return the plans that give different results through shared memory and by messages."""
    rank, number, wrong = dist.get_rank(), dist.get_world_size(), []
    for plan in (in_lanes(number), *plans.of(number)):
        two, one = TwoSided(plan, None), OneSided(plan, None)
        for m, dtype in itertools.product(sizes, dtypes):
            own = plans.inputs(plan, m, 2, dtype=dtype)[rank]
            wanted, kept = own.new_empty(plan.out_chunks // plan.chunks * m, 2), own.clone()
            two.start(own, wanted, m).wait()
            one.memory.region(rank)[: one.memory.size] = 0xFF
            dist.barrier()
            for _ in range(2):
                got = torch.empty_like(wanted)
                one.start(own, got, m).wait()
                if not (torch.equal(kept, own) and torch.equal(wanted, got)):
                    wrong.append((plan.name, m, dtype))
        m = 8 * 9 * 5 * plan.chunks
        size = 8 * m * plan.in_chunks // plan.chunks
        links = check(plan).bytes_of_link.items()
        if bytes_put(one, m, torch.float64) != {ends: n * size for ends, n in links if ends[0] == rank}:
            wrong.append(plan.name)
    return wrong


@pytest.mark.parametrize(
    ("number", "sizes", "dtype"), [(2, (0, 1, 20011), torch.float32), (4, (1007,), torch.bfloat16)]
)
def test_plans_in_shared_memory_equal_plans_over_messages_in_results_and_bytes(ranks, number, sizes, dtype):
    assert ranks(number).run(same, sizes, [dtype]) == [[]] * number


@pytest.mark.long
@pytest.mark.parametrize(("number", "m"), [(3, 499_999), (4, 499_999), (8, 99_999)])
def test_shared_memory_plans_work_for_any_number_of_elements_and_any_dtype(ranks, number, m):
    assert ranks(number).run(same, (3, m), DTYPES) == [[]] * number


def grown(what):
    """Return the bytes of shared memory before and after several calls, and whether all sums are right."""
    program = OneSided(make("one_phase", "all_reduce", 2), None)
    before, patch = program.memory.size, pytest.MonkeyPatch()
    if what == "full":
        patch.setattr(os, "posix_fallocate", no_space)
    elif what == "others'":
        state = SimpleNamespace(f_bavail=60, f_blocks=100, f_frsize=1 << 18)
        patch.setattr(os, "fstatvfs", lambda _: state)
    right = []
    for m in (10, 300_001, 300_001, 7, 50_000):
        own = torch.arange(m, dtype=torch.float64) + dist.get_rank()
        out = torch.empty_like(own)
        program.start(own, out, m).wait()
        right.append(torch.equal(out, 2 * torch.arange(m, dtype=torch.float64) + 1))
    patch.undo()
    return before, program.memory.size, all(right)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_shared_memory_grows_if_possible_and_calls_also_work_without_growth(ranks):
    least, most = 4 * (1 << 14), 4 * (1 << 20)
    for what, after in (("free", most), ("full", least), ("others'", least)):
        assert ranks(2).run(grown, what) == [(least, after, True)] * 2


def many(calls, longest):
    """Call plans in turn with random sizes and pauses, and return the calls with wrong results."""
    number, rank = dist.get_world_size(), dist.get_rank()
    names = ("two_phase", "one_phase", "ring")
    programs = [OneSided(make(name, "all_reduce", number), None) for name in names]
    together, alone, wrong = random.Random(1), random.Random(rank), []
    for call in range(calls):
        program, m = together.choice(programs), together.choice((1, 9, 500, 70_000))
        own = torch.arange(m) * (call + 1) + rank
        if alone.random() < 0.1:
            time.sleep(alone.random() * longest)
        out = torch.full_like(own, -1)
        program.start(own, out, m).wait()
        if not torch.equal(out, number * own + number * (number - 1) // 2 - number * rank):
            wrong.append((call, program.plan.name, m))
    return wrong


@pytest.mark.parametrize(
    ("number", "calls"), [(2, 100), *(pytest.param(n, 1000, marks=pytest.mark.long) for n in (2, 3, 4, 8))]
)
def test_consecutive_plan_calls_with_random_pauses_return_correct_results(ranks, number, calls):
    assert ranks(number).run(many, calls, 0.01) == [[]] * number


def until_the_end(rank, folder, fate):
    """Call a plan repeatedly until rank 1 dies or stops."""
    shared_memory.FOLDER = folder
    guard.set_timeout(1)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    program = OneSided(make("ring", "all_reduce", 3), group)
    with guarded("the all-reduce of a test", group):
        for call in range(100):
            if (rank, call) == (1, 50):
                fate()
            program.start(torch.ones(999), torch.empty(999), 999).wait()


@pytest.mark.parametrize("fate", [mortal.die, pytest.param(mortal.stop, marks=pytest.mark.long)])
def test_errors_name_a_dead_or_stopped_rank(tmp_path, fate):
    said, seconds = mortal.run(until_the_end, 3, [0, 2], str(tmp_path), fate)
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"CommunicationError: rank {rank} could not finish the all-reduce of" in sentence
        assert "rank 1 did not answer a health check of 1 s; look at the log of rank 1" in sentence
    assert seconds < 12  # A time-out and two health checks take less than 12 s.
    assert list(tmp_path.iterdir()) == []
