"""Chunks to ranges of elements: plans run on lists here, move by move, and give what they are to give.

Covered: every collective at sizes that do not divide, blocks of an all-to-all with sizes of their own
that pass through other ranks; neighbours are one piece; rounds of the two-sided form; what waits for ever.
"""

from itertools import chain

import plans
import pytest

from fairseq_tutel.comm.plan_layout import Layout, walk
from fairseq_tutel.planning.plan import Plan, Writer


def run(plan: Plan, layout: Layout, ins: list[list]) -> list[list]:
    """Return what every rank has at the end."""
    memory = [
        {"in": own, **{b: [None] * layout.size(r, b) for b in ("out", "tmp")}}
        for r, own in enumerate(ins)
    ]
    for move in walk(plan).moves:
        here, there = memory[move.rank], memory[move.target][move.step.dst.buffer]
        for src, dst, n in layout.pieces(move):
            parts = [
                here[place.buffer][at : at + n]
                for place, at in zip(move.step.src, src, strict=True)
            ]
            assert all(len(part) == n for part in parts) and dst + n <= len(there)
            there[dst : dst + n] = map(sum, zip(*parts, strict=True))
    return [each["out"] for each in memory]


@pytest.mark.parametrize("m", (0, 1, 2, 3, 7))
def test_plans_give_what_they_are_to_at_any_size(m):
    n = 4
    shards = [[[1000 * r + 100 * g + i for i in range(m)] for g in range(n)] for r in range(n)]
    rows = [[*chain(*row)] for row in shards]
    firsts = [row[0] for row in shards]
    wanted = {
        "all_reduce": [[sum(c) for c in zip(*firsts, strict=True)]] * n,
        "reduce_scatter": [[sum(c) for c in zip(*(s[g] for s in shards), strict=True)] for g in range(n)],
        "all_gather": [[*chain(*firsts)]] * n,
        "all_to_all": [[*chain(*(s[g] for s in shards))] for g in range(n)],
    }  # fmt: skip
    for make in plans.ALL:
        plan = make(n)
        ins = firsts if plan.in_chunks == plan.chunks else rows
        assert run(plan, Layout(walk(plan), m), ins) == wanted[plan.collective], plan.name


@pytest.mark.parametrize("make", (plans.all_to_all, plans.all_to_all_in_two_hops))
def test_blocks_of_their_own_sizes_pass_through_other_ranks(make):
    n = 4
    sizes = [[(3 * s + 5 * d) % 4 for d in range(n)] for s in range(n)]
    blocks = [
        [[16 * s + 4 * d + i for i in range(sizes[s][d])] for d in range(n)] for s in range(n)
    ]
    ins = [[*chain(*row)] for row in blocks]
    plan = make(n)
    outs = [[*chain(*(blocks[s][d] for s in range(n)))] for d in range(n)]
    assert run(plan, Layout(walk(plan), sizes), ins) == outs


def test_neighbours_are_one_piece_and_rounds_follow_the_longest_path():
    ring = walk(plans.all_gather(4))
    puts = [move for move in ring.moves if move.step.op == "put"]
    assert all(len(Layout(ring, 10).pieces(move)) == 1 for move in puts)
    assert sorted(move.round for move in puts) == sorted([1, 2, 3] * 4)
    assert {m.round for m in walk(plans.all_to_all(4)).moves if m.step.op == "put"} == {1}


def test_a_signal_without_puts_takes_no_round_and_a_flush_sends():
    writer = Writer(2)
    writer.signal(1, 0)
    writer.wait(0, 1)
    writer.copy(0, ("in", 0), ("tmp", 0))
    writer.put(0, 1, ("tmp", 0), ("out", 0))
    writer.flush(0, 1)
    writer.copy(0, ("in", 0), ("tmp", 0))
    writer.put(0, 1, ("tmp", 0), ("tmp", 0))
    writer.signal(0, 1)
    writer.wait(1, 0)
    writer.copy(1, ("tmp", 0), ("out", 1))
    moves = walk(writer.plan("handshake", "all_gather", 1, temporary=1)).moves
    assert [(m.step.op, m.round) for m in moves] == [
        ("copy", 0), ("put", 1), ("copy", 1), ("put", 2), ("copy", 2)
    ]  # fmt: skip


def test_what_waits_for_ever_or_reads_nothing_is_no_layout():
    writer = Writer(2)
    writer.wait(0, 1)
    with pytest.raises(ValueError, match="never comes"):
        walk(writer.plan("stuck", "all_gather", 1))
    writer = Writer(1)
    writer.copy(0, ("tmp", 0), ("out", 0))
    with pytest.raises(ValueError, match="rank 0, lane 0, step 0 reads what nobody wrote"):
        walk(writer.plan("nothing", "all_gather", 1, temporary=1))
