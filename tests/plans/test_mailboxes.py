"""Plans across hosts: shared memory on each host, messages between hosts. Hosts are sets of ranks here."""

import itertools
import random
import re
import time

import mortal
import numpy as np
import plans
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.collectives import Started
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors import shared_memory
from fairseq_tutel.plans.executors.backend import PlanBackend
from fairseq_tutel.plans.executors.mailboxes import Mailboxes, _cut
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.forestcoll.forest import grow_for
from fairseq_tutel.plans.format import REDUCING
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plans.generators.forest import forest
from fairseq_tutel.plans.network import find

TWO_BY_TWO = (0, 0, 1, 1)
SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
OTHERS = (torch.uint8, torch.int16, torch.float8_e4m3fn)


def forests(network, slices=2):
    """Return ForestColl's plans for a network."""
    return [
        forest(collective, *grow_for(find(network), collective), slices=slices)
        for collective in ("all_gather", "reduce_scatter", "all_reduce")
    ]


def by_torch(plan, own, out):
    """Run the plan's collective with torch."""
    if plan.collective == "all_gather":
        dist.all_gather_into_tensor(out, own)
    elif plan.collective == "reduce_scatter":
        dist.reduce_scatter_tensor(out, own)
    elif plan.collective == "all_reduce":
        dist.all_reduce(out.copy_(own))
    else:
        dist.all_to_all_single(out, own)


def differing(hosts, sizes, dtypes, network=""):
    """Return the plans with other results than their steps give in one process, or than torch's."""
    rank, number, wrong = dist.get_rank(), dist.get_world_size(), []
    shared = Mailboxes(None, hosts)
    for plan in (*plans.of(number), *(forests(network) if network else ())):
        program = TwoSided(plan, None, shared)
        kinds = dtypes if plan.collective in REDUCING or len(dtypes) == 1 else (*dtypes, *OTHERS)
        for m, dtype in itertools.product(sizes, kinds):
            ins = [each.abs().clamp(max=100).to(dtype) for each in plans.inputs(plan, m, 2)]
            own = ins[rank].clone()
            # torch cannot fill tensors of other types with -1.
            results = plans.result(plan, m, ins) if dtype in SUMMED else plans.wanted(plan, ins)
            wanted = results[rank]
            out = torch.zeros_like(wanted)
            program.start(own, out, m).wait()
            if not torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)):
                wrong.append((plan.name, m, dtype))
            if not torch.equal(own.view(torch.uint8), ins[rank].view(torch.uint8)):
                wrong.append((plan.name, m, dtype, "in"))
            if dtype == torch.int64:
                by_torch(plan, own, expected := torch.empty_like(out))
                if not torch.equal(out, expected):
                    wrong.append((plan.name, m, "torch"))
    return wrong


def test_results_are_those_of_one_process_and_of_torch(ranks):
    for sizes, dtypes in (((5,), SUMMED), ((0, 3), SUMMED[:1])):
        got = ranks(4).run(differing, TWO_BY_TWO, sizes, dtypes, "boxes:2x2:10:1")
        assert got == [[]] * 4


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 1, 1, 1)])
def test_hosts_may_be_of_any_ranks(ranks, hosts):
    assert ranks(4).run(differing, hosts, (3,), (torch.float32,)) == [[]] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "network"),
    [(TWO_BY_TWO, "boxes:2x2:10:1"), ((0, 0, 1), ""), ((0,) * 4 + (1,) * 4, "cluster:2x4:10:1")],
)
def test_results_of_large_tensors(ranks, hosts, network):
    # More than the slots of a mailbox hold.
    sizes = (1, 10_007, 200_003)
    assert ranks(len(hosts)).run(differing, hosts, sizes, SUMMED[1:5], network) == [[]] * len(hosts)


def ragged(calls, most):
    """Exchange rows of other sizes in every call; return the calls with other rows than torch's."""
    rank, number, wrong = dist.get_rank(), dist.get_world_size(), []
    shared = Mailboxes(None, TWO_BY_TWO)
    named = [make("linear", "all_to_all", number), make("two_hops", "all_to_all", number, nodes=2)]
    programs = [TwoSided(plan, None, shared) for plan in named]
    dice = random.Random(1)
    for call in range(calls):
        sizes = tuple(
            tuple(dice.choice((0, 1, dice.randrange(most))) for _ in range(number)) for _ in range(number)
        )
        if call == 0:
            sizes = ((0,) * number,) * number
        arriving = [row[rank] for row in sizes]
        rows = torch.randn(sum(sizes[rank]), 5)
        wanted = rows.new_empty(sum(arriving), 5)
        dist.all_to_all_single(wanted, rows, arriving, list(sizes[rank]))
        for program in programs:
            out = torch.full_like(wanted, -1)
            program.start(rows, out, sizes).wait()
            if not torch.equal(out, wanted):
                wrong.append((call, program.plan.name, sizes))
    return wrong


@pytest.mark.parametrize("calls", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_rows_of_any_sizes(ranks, calls):
    assert ranks(4).run(ragged, calls, 3000) == [[]] * 4


def paused(calls, longest):
    """Call plans of two groups of mailboxes in turn, with pauses; return the wrong calls."""
    number, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    shared = Mailboxes(None, TWO_BY_TWO)
    names = ("two_phase", "one_phase", "ring")
    programs = [TwoSided(make(name, "all_reduce", number), None, shared) for name in names]
    together, alone = random.Random(1), random.Random(rank)
    for call in range(calls):
        program, m = together.choice(programs), together.choice((1, 9, 500, 200_000))
        own = torch.arange(m) * (call + 1) + rank
        if alone.random() < 0.1:
            time.sleep(alone.random() * longest)
        out = torch.full_like(own, -1)
        program.start(own, out, m).wait()
        if not torch.equal(out, number * own + number * (number - 1) // 2 - number * rank):
            wrong.append((call, program.plan.name, m))
    return wrong


@pytest.mark.parametrize("calls", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_calls_in_a_row_with_pauses(ranks, calls):
    assert ranks(4).run(paused, calls, 0.01) == [[]] * 4


def sent(m):
    """Return, for each plan, the bytes from this rank to others outside of mailboxes."""
    found, shared = [], Mailboxes(None, TWO_BY_TWO)
    for plan in plans.of(4):
        own = plans.inputs(plan, m)[dist.get_rank()]
        program = TwoSided(plan, None, shared)
        with plans.sent() as (to, _):
            program.start(own, own.new_empty(plan.out_chunks // plan.chunks * m), m).wait()
        found.append(dict(to))
    return found


def test_only_bytes_between_hosts_are_sent(ranks):
    m = 24
    got = ranks(4).run(sent, m)
    for number, plan in enumerate(plans.of(4)):
        size = 4 * m * plan.in_chunks // plan.chunks
        wanted = {
            (source, target): part * size
            for (source, target), part in check(plan).bytes_of_link.items()
            if TWO_BY_TWO[source] != TWO_BY_TWO[target]
        }
        assert {(r, to): n for r, of in enumerate(got) for to, n in of[number].items()} == wanted, plan.name


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_slots_hold_all_bytes_in_order(size):
    pieces = [np.arange(n, dtype=np.uint8) for n in (3, 0, 4, 13, 1)]
    slots = []
    for parts in _cut(pieces, size):
        slots.append(np.full(size, 255, np.uint8))
        for first, part in parts:
            slots[-1][first : first + len(part)] = part
    got = np.concatenate(slots)
    assert np.array_equal(got[:21], np.concatenate(pieces)) and (got[21:] == 255).all()
    assert len(slots) == -(-21 // size)


def chosen(local, folder=None):
    """Run a plan by a backend; return whether its result is right, and what it has logged."""
    patch = pytest.MonkeyPatch()
    if folder is not None:
        patch.setattr(shared_memory, "FOLDER", folder)
    backend = PlanBackend(plans.placed(make("one_phase", "all_reduce", 4)), local)
    own, out = torch.full((9,), float(dist.get_rank())), torch.empty(9)
    backend.chosen("all_reduce", own, "a test", None).start(own, out, 9).wait()
    patch.undo()
    return torch.equal(out, torch.full((9,), 6.0)), sorted(backend._logged)[1]


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ((0,), "in shared memory"),
        ((4,), "in shared memory"),
        ((2,), "in shared memory on each host, and by messages between hosts"),
        ((3,), "in shared memory on each host, and by messages between hosts"),
        ((1,), "by messages: each rank is on another host"),
        (
            (2, "/dev/null"),
            "by messages: The ranks cannot share memory: on rank 0 of the group, /dev/null/",
        ),
    ],
)
def test_hosts_determine_how_a_plan_runs(ranks, arguments, how):
    for right, sentence in ranks(4).run(chosen, *arguments):
        assert right
        assert sentence.startswith(f"the collective plan one_phase_all_reduce runs {how}")
        assert "messages" in how or sentence.endswith("memory")


def until_the_end(rank, folder, fate, victim, size):
    """Call a plan repeatedly; one rank dies or stops in the middle."""
    shared_memory.FOLDER = folder
    guard.set_timeout(1)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    program = TwoSided(make("ring", "all_reduce", 4), group, Mailboxes(None, TWO_BY_TWO))
    with guard.guarded("a plan", group):
        for call in range(100):
            if (rank, call) == (victim, 50):
                fate()
            Started(program.start(torch.ones(size), torch.empty(size), size), "a plan", group).wait()


@pytest.mark.parametrize(
    ("fate", "victim", "size"),
    [
        (mortal.die, 1, 999),
        pytest.param(mortal.die, 2, 999_999, marks=pytest.mark.long),
        pytest.param(mortal.stop, 1, 999, marks=pytest.mark.long),
        pytest.param(mortal.stop, 0, 999_999, marks=pytest.mark.long),
    ],
)
def test_a_dead_or_stopped_rank_is_named(tmp_path, fate, victim, size):
    survivors = [rank for rank in range(4) if rank != victim]
    said, seconds = mortal.run(until_the_end, 4, survivors, str(tmp_path), fate, victim, size)
    for rank, sentence in zip(survivors, said, strict=True):
        assert f"CommunicationError: rank {rank} could not finish a plan" in sentence
        # On a busy machine, a rank that waits for a rank which is ending may be late, too.
        late = rf"ranks? [\d, -]*{victim}\b[\d, -]* did not answer a health check of 1 s"
        store = r"see rank 0's error .* it runs the rendezvous store, which does not answer"
        assert re.search(late if victim else f"{late}|{store}", sentence)
    assert seconds < 15  # two timeouts, two health checks and a busy machine
    assert list(tmp_path.iterdir()) == []
