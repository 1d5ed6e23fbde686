"""Plans over two-sided messages: torch's bits, sums in the plan's order, no byte beyond the plan's.

Covered: every collective on 2 to 4 ranks (8 long), no elements to a million and sizes that do not divide,
rows, fp32, fp16 and integers; blocks of an all-to-all of any size, through other ranks; bytes by source
and destination; calls that begin before others end; a killed and a stopped rank.
"""

import itertools
from collections import Counter

import mortal
import plans
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.comm.collectives import Started
from fairseq_tutel.comm.plan_layout import Layout, walk
from fairseq_tutel.comm.plan_p2p import TwoSided
from fairseq_tutel.ranks import guard

SIZES = (0, 1, 2, 5, 1000, 4099)


def data(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=generator)).to(dtype)


def sum_of(tensors):
    """Rank by rank, narrow ones in fp32."""
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype == torch.float16 else tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)


def run(program, own, out_len, sizes):
    out = own.new_empty(out_len, *own.shape[1:])
    program.start(own, out, sizes).wait()
    return out


def every_collective(sizes):
    """Run all plans on this rank; return what is wrong."""
    n, rank = dist.get_world_size(), dist.get_rank()
    wrong = []
    for make in plans.ALL:
        if n % 2 and make is plans.all_to_all_in_two_hops:
            continue
        plan = make(n)
        program = TwoSided(plan, None)
        for m, dtype in itertools.product(sizes, (torch.float32, torch.float16, torch.int64)):
            shards = 1 if plan.in_chunks == plan.chunks else n
            ins = [data(r, shards * m, 2, dtype=dtype) for r in range(n)]
            parts = [[own[g * m :][:m] for g in range(shards)] for own in ins]
            wanted = {
                "all_reduce": lambda ins=ins: sum_of(ins),
                "reduce_scatter": lambda parts=parts: sum_of([part[rank] for part in parts]),
                "all_gather": lambda ins=ins: torch.cat(ins),
                "all_to_all": lambda parts=parts: torch.cat([part[rank] for part in parts]),
            }[plan.collective]()
            kept = ins[rank].clone()
            got = run(program, ins[rank], len(wanted), m)
            if not (torch.equal(got, wanted) and torch.equal(kept, ins[rank])):
                wrong.append((plan.name, plan.collective, m, dtype))
    return wrong


@pytest.mark.parametrize("number", (2, 3, 4, pytest.param(8, marks=pytest.mark.long)))
def test_bits_are_those_of_a_fixed_order(ranks, number):
    assert ranks(number).run(every_collective, SIZES) == [[]] * number


@pytest.mark.long
@pytest.mark.parametrize("number", (2, 4, 8))
def test_a_million_elements(ranks, number):
    assert ranks(number).run(every_collective, (999_999, 1_000_000)) == [[]] * number


def ragged(seed):
    """Return whether all rows came, there and back, as torch brings them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 5, (n, n), generator=generator)
    sizes[:, seed % n] = 0  # a rank that gets nothing
    rows = data(rank, int(sizes[rank].sum()), 3)
    wanted = rows.new_empty(int(sizes[:, rank].sum()), 3)
    dist.all_to_all_single(wanted, rows, sizes[:, rank].tolist(), sizes[rank].tolist())
    fine = []
    for make in (plans.all_to_all, plans.all_to_all_in_two_hops):
        program = TwoSided(make(n), None)
        there = run(program, rows, len(wanted), sizes.tolist())
        back = run(program, there, len(rows), sizes.T.tolist())
        fine.append(torch.equal(there, wanted) and torch.equal(back, rows))
    return fine


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_any_size_cross_as_torch_brings_them(ranks, seed):
    assert ranks(4).run(ragged, seed) == [[True, True]] * 4


def own_blocks_alone():
    """A direct plan where a rank knows what it sends and gets, and no more."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = [[(s + 2 * d) % 3 if rank in (s, d) else 0 for d in range(n)] for s in range(n)]
    rows = data(rank, sum(sizes[rank]))
    receive = [row[rank] for row in sizes]
    wanted = rows.new_empty(sum(receive))
    dist.all_to_all_single(wanted, rows, receive, sizes[rank])
    return torch.equal(run(TwoSided(plans.all_to_all(n), None), rows, len(wanted), sizes), wanted)


def test_who_sends_directly_need_not_know_the_blocks_of_others(ranks):
    assert ranks(4).run(own_blocks_alone) == [True] * 4


def bytes_sent(make, m):
    """Return the bytes from this rank to each other one, and the largest number of messages of a round."""
    sent, rounds, original = Counter(), [], dist.batch_isend_irecv

    def counting(operations):
        for each in operations:
            if each.op is dist.isend:
                sent[each.peer] += each.tensor.numel() * each.tensor.itemsize
        rounds.append(Counter((each.op.__name__, each.peer) for each in operations))
        return original(operations)

    plan = make(dist.get_world_size())
    own = data(dist.get_rank(), m * plan.in_chunks // plan.chunks)
    dist.batch_isend_irecv = counting
    try:
        run(TwoSided(plan, None), own, m * plan.out_chunks // plan.chunks, m)
    finally:
        dist.batch_isend_irecv = original
    return dict(sent), max(max(each.values()) for each in rounds)


@pytest.mark.parametrize("make", plans.ALL)
def test_bytes_by_source_and_destination_are_the_plans(ranks, make):
    m, walked = 11, walk(make(4))
    layout, wanted = Layout(walked, m), Counter()
    for move in walked.moves:
        if move.step.op == "put":
            wanted[move.rank, move.target] += 4 * sum(map(layout.length, move.kinds))
    got = ranks(4).run(bytes_sent, make, m)
    assert {(r, to): n for r, (sent, _) in enumerate(got) for to, n in sent.items()} == wanted
    assert [most for _, most in got] == [1] * 4


def many_at_once():
    """Begin three calls of several rounds before the first is waited for."""
    n, rank = dist.get_world_size(), dist.get_rank()
    program, outs = TwoSided(plans.all_gather(n), None), torch.empty(3, 5 * n)
    calls = [program.start(data(rank, 5) + i, out, 5) for i, out in enumerate(outs)]
    begun = [call.is_completed() for call in calls]
    for call in calls:
        call.wait()
    wanted = torch.stack([torch.cat([data(r, 5) + i for r in range(n)]) for i in range(3)])
    return begun, [call.is_completed() for call in calls], torch.equal(outs, wanted)


def test_calls_may_begin_before_others_end(ranks):
    assert ranks(4).run(many_at_once) == [([False] * 3, [True] * 3, True)] * 4


def thousand():
    program, own = TwoSided(plans.all_reduce(dist.get_world_size()), None), torch.ones(7)
    for _ in range(1000):
        own = run(program, own, 7, 7) / dist.get_world_size()
    return own.tolist()


@pytest.mark.long
def test_a_thousand_calls_in_a_row(ranks):
    assert ranks(4).run(thousand) == [[1.0] * 7] * 4


TIMEOUT = 1


def _reduce(rank, fate):
    guard.set_timeout(TIMEOUT)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    program, own, out = TwoSided(plans.all_reduce(3), group), torch.ones(3), torch.empty(3)
    Started(program.start(own, out, 3), "a plan", group).wait()
    if rank == 1:
        fate()
    with guard.guarded("a plan", group):
        Started(program.start(own, out, 3), "a plan", group).wait()


@pytest.mark.parametrize("fate", [mortal.die, mortal.stop])
def test_a_dead_or_stopped_rank_is_named(fate):
    said, seconds = mortal.run(_reduce, 3, [0, 2], fate)
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"rank {rank} could not finish a plan" in sentence
        assert "rank 1 did not answer a roll call of 1 s" in sentence
    assert seconds < 3 * TIMEOUT + 2 * guard.GRACE_SECONDS + 4
