"""For random plans and sizes, both executors return the result of the plan's steps.

The function `evaluated` computes this result with a separate tensor for each chunk.
"""

from random import Random

import plans
import pytest
import torch
import torch.distributed as dist
from plan_edits import drawn

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.executors.one_sided import OneSided
from fairseq_tutel.plans.executors.two_sided import TwoSided, add_up
from fairseq_tutel.plans.format import PlanError


def random_plan(dice, ranks):
    """Return a generated plan after random edits that keep the plan correct."""
    plan = dice.choice(plans.of(ranks))
    for _ in range(30):
        edited = drawn(dice, plan, 1)
        try:
            check(edited)
        except PlanError:
            continue
        plan = edited
        if dice.random() < 0.4:
            break
    return plan


def cut(shard, chunks):
    size = -(-len(shard) // chunks)
    return [shard[c * size : (c + 1) * size] for c in range(chunks)]


def evaluated(plan, shards):
    """Return the `out` buffers of all ranks for the given input shards."""
    held = {}
    for rank, own in enumerate(shards):
        pieces = [piece for shard in own for piece in cut(shard, plan.chunks)]
        held |= {(rank, "in", i): piece for i, piece in enumerate(pieces)}
    order = Order(plan)
    for number in order.run:
        step, rank = order.steps[number], order.sites[number][0]
        if step.dst is None:
            continue
        target = plan.target_of(rank, step)
        for i in range(step.n):
            terms = [held[rank, place.buffer, place.chunk + i] for place in step.src]
            total = torch.empty_like(terms[0])
            add_up(terms, total)
            held[target, step.dst.buffer, step.dst.chunk + i] = total
    return [torch.cat([held[r, "out", i] for i in range(plan.out_chunks)]) for r in range(plan.ranks)]


def run(seeds):
    """Return the random seeds for which this rank's result is wrong."""
    wrong, rank, n = [], dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        dice = Random(seed)
        plan, most = random_plan(dice, n), dice.choice((40, 9000))
        m = dice.randrange(most)
        sizes = m
        if plan.collective == "all_to_all":
            sizes = tuple(tuple(dice.choice((0, dice.randrange(most))) for _ in range(n)) for _ in range(n))
        generator = torch.Generator().manual_seed(seed)
        count = plan.in_chunks // plan.chunks
        shards = [
            [torch.randn(m if sizes == m else sizes[r][d], 3, generator=generator) for d in range(count)]
            for r in range(n)
        ]
        own = torch.cat(shards[rank])
        wanted = evaluated(plan, shards)[rank]
        for program in (TwoSided(plan, None), OneSided(plan, None)):
            out = torch.full_like(wanted, -1.0)
            program.start(own, out, sizes).wait()
            if not torch.equal(out, wanted):
                wrong.append((seed, plan.name, sizes, program.__class__.__name__))
    return wrong


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(300), marks=pytest.mark.long)])
def test_random_plans_return_the_result_of_their_steps(ranks, seeds):
    assert ranks(4).run(run, list(seeds)) == [[]] * 4
