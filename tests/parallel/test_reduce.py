"""ZeRO reduces gradients to the ranks that own them, for every stage and number of backward passes."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from uneven import backward, gradient_of, some_parameters

from fairseq_tutel import make_topology
from fairseq_tutel.parallel.gradients import mark_root_scaled
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.zero_partition import Share, own_elements
from fairseq_tutel.parallel.zero_state import ZeroState


def reduced_gradients(stage, parallel, backwards, skip):
    """Return this rank's reduced gradients after backward passes that skip some parameters."""
    rank, place = dist.get_rank(), make_topology([4], parallel)
    parameters = some_parameters()
    mark_root_scaled(parameters[5])
    zero = ZeroState(parameters, place, stage, bucket_bytes=100)
    for update in range(2):  # A second update must not depend on the first.
        zero.zero_grad()
        for _ in range(backwards):
            backward(parameters, rank, [(skip * rank) % 8] if skip else [], turn=rank)
            zero.reducer.finish_backward()
        zero.reducer.reduce()
        zero.reducer.reduce()  # Fairseq reduces gradients again if a criterion has parameters.
        norm = zero.norm()
        if update == 1:
            assert all(p.grad is None for p, q in zip(parameters, zero.partitions, strict=True)
                       if q.share.size > 1)  # fmt: skip
    found = {}
    for bucket in zero.buckets:
        for partition, grad in zip(bucket.partitions, bucket.gradients(), strict=True):
            found[zero.partitions.index(partition)] = grad
    return [found[i] for i in range(len(found))], float(norm)


@pytest.mark.parametrize(("stage", "parallel", "backwards", "skip"), [
    (1, 2, 3, 3), (2, 2, 3, 3), (2, 4, 2, 5), (2, 1, 1, 0),
])  # fmt: skip
def test_each_rank_gets_the_averages_of_the_gradients_that_it_owns(ranks, stage, parallel, backwards, skip):
    """Ranks skip different parameters, and compute gradients in different orders."""
    got = ranks(4).run(reduced_gradients, stage, parallel, backwards, skip)
    square = 0.0
    for number, parameter in enumerate(some_parameters()):
        for rank in range(4):
            expert = number in (4, 5)
            of = [r for r in range(4) if not expert or r % parallel == rank % parallel]
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for r in of:
                used = not skip or (skip * r) % 8 != number
                total += backwards * used * gradient_of(parameter, number, r)
            average = total / (2 if number == 5 else 4)  # The divisor of parameter 5 is sqrt(4).
            share = Share(len(of), of.index(rank))
            expected = own_elements(average.contiguous(), share)
            square += float(expected.square().sum())
            torch.testing.assert_close(got[rank][0][number], expected, rtol=1e-12, atol=1e-12)
    norms = [norm for _, norm in got]
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(math.sqrt(square), rel=1e-12)


def test_a_second_zero_optimizer_replaces_the_first():
    """Loading a checkpoint builds a second optimizer, and the first must no longer send gradients."""
    place = Topology(world_size=2, rank=0, expert_parallel_size=1)
    parameters = some_parameters()[:1]
    first, second = (ZeroState(parameters, place, 2) for _ in range(2))
    for zero in (first, second):
        zero.reducer._send = lambda zero=zero: setattr(zero.reducer, "sent", 1)
    parameters[0].sum().backward()
    assert (first.reducer.sent, second.reducer.sent) == (0, 1)


def shared_by_two_checkpoints():
    place = make_topology([4], 1)
    parameter = nn.Parameter(torch.ones(4))
    zero = ZeroState([parameter], place, 2)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: x * parameter, x, use_reentrant=True)
    message = ""
    try:
        x.sum().backward()
    except RuntimeError as error:
        message = str(error)
    zero.reducer.finish_backward()  # This rank must receive the gradients that other ranks sent.
    return message


def test_a_gradient_that_autograd_accumulates_in_parts_raises_an_error(ranks):
    for message in ranks(2).run(shared_by_two_checkpoints):
        assert "of shape (4,) got another gradient after its gradient was sent" in message
        assert "give --moe-zero-stage 1" in message
