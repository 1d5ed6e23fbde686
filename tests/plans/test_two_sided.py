"""Plans that send messages return the results of torch's collectives, and add in the plan's order."""

import mortal
import plans
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.collectives import Started
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.format import REDUCING
from fairseq_tutel.plans.generators import make

TYPES = (torch.float32, torch.int64, torch.float16)
CASES = ((0, TYPES[0]), (1, TYPES[1]), (5, TYPES[2]), (4099, TYPES[0]))


def data(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def run(program, own, out_len, sizes):
    out = own.new_empty(out_len, *own.shape[1:])
    program.start(own, out, sizes).wait()
    return out


def every_collective(cases):
    """Run all plans on this rank, and return the plans with wrong results."""
    wrong, rank = [], dist.get_rank()
    for plan in plans.of(dist.get_world_size()):
        program = TwoSided(plan, None)
        for m, dtype in cases:
            ins = plans.inputs(plan, m, 2, dtype=dtype)
            wanted = plans.result(plan, m, ins)[rank]
            kept = ins[rank].clone()
            got = run(program, ins[rank], len(wanted), m)
            if not (torch.equal(got, wanted) and torch.equal(kept, ins[rank])):
                wrong.append((plan.name, m, dtype))
            by_rank = plans.wanted(plan, ins)[rank]
            # The one_phase and two_phase plans sum in rank order, and other plans round differently.
            same = plan.name.startswith(("one_phase", "two_phase")) or plan.collective not in REDUCING
            rounded = 0.5 * plan.ranks if dtype == torch.float16 else 1e-3
            off = 0.0 if same or dtype == torch.int64 else rounded
            torch.testing.assert_close(got, by_rank, rtol=0, atol=off)
    return wrong


def test_plans_over_messages_give_the_same_bits_as_plans_run_in_one_process(ranks):
    assert ranks(4).run(every_collective, CASES) == [[]] * 4


def many_at_once():
    """Start three calls of several rounds before waiting for the first call."""
    n, rank = dist.get_world_size(), dist.get_rank()
    program, outs = TwoSided(make("ring", "all_gather", n), None), torch.empty(3, 5 * n)
    calls = [program.start(data(rank, 5) + i, out, 5) for i, out in enumerate(outs)]
    begun = [call.is_completed() for call in calls]
    for call in calls:
        call.wait()
    wanted = torch.stack([torch.cat([data(r, 5) + i for r in range(n)]) for i in range(3)])
    return begun, [call.is_completed() for call in calls], torch.equal(outs, wanted)


def test_a_plan_call_can_start_before_earlier_calls_end(ranks):
    assert ranks(4).run(many_at_once) == [([False] * 3, [True] * 3, True)] * 4


TIMEOUT = 1


def _reduce(rank, fate):
    guard.set_timeout(TIMEOUT)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    program = TwoSided(make("one_phase", "all_reduce", 3), group)
    own, out = torch.ones(3), torch.empty(3)
    Started(program.start(own, out, 3), "a plan", group).wait()
    if rank == 1:
        fate()
    with guard.guarded("a plan", group):
        Started(program.start(own, out, 3), "a plan", group).wait()


@pytest.mark.parametrize("fate", [mortal.die, pytest.param(mortal.stop, marks=pytest.mark.long)])
def test_errors_name_a_dead_or_stopped_rank(fate):
    said, seconds = mortal.run(_reduce, 3, [0, 2], fate)
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"rank {rank} could not finish a plan" in sentence
        assert "rank 1 did not answer a health check of 1 s" in sentence
    assert seconds < 3 * TIMEOUT + 2 * guard.GRACE_SECONDS + 4
