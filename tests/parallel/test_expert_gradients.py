"""The tests check how expert gradients are reduced over EP replicas, counted in the norm, and clipped."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel import MoEConfig, MoELayer, Topology, make_topology
from fairseq_tutel.parallel.gradients import (
    clip_gradients,
    global_grad_norm,
    is_expert,
    mark_expert,
    reduce_expert_gradients,
    rescale_expert_gradients,
)


def with_gradient(values: list[float], expert: bool) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    if expert:
        mark_expert(parameter)
    return parameter


def reduce(parallel: int, missing: bool) -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    dense = with_gradient([5.0], expert=False)
    expert = with_gradient([2.0**rank, 1.0], expert=True)
    if missing and rank == 3:
        expert.grad = None
    reduce_expert_gradients([dense, expert], make_topology([4], parallel))
    return dense.grad.tolist(), expert.grad.tolist()


@pytest.mark.parametrize(
    ("parallel", "missing", "expected"),
    [
        # Ranks 0 and 2 hold one half of the experts, and ranks 1 and 3 hold the other half.
        (2, False, [[total / 4, 2 / 4] for total in (5, 10, 5, 10)]),
        # A missing gradient counts as zero.
        (2, True, [[1.25, 0.5], [0.5, 0.25], [1.25, 0.5], [0.5, 0.25]]),
        (4, False, [[2**r / 4, 1 / 4] for r in range(4)]),
    ],
)
def test_expert_gradients_are_sums_over_replicas_divided_by_world_size(ranks, parallel, missing, expected):
    assert ranks(4).run(reduce, parallel, missing) == [([5.0], grad) for grad in expected]


def norm(parallel: int) -> float:
    topology = make_topology([4], parallel)
    dense = with_gradient([3.0, 1.0], expert=False)
    # Expert e has the gradient e + 1, and each rank holds 4 / `parallel` experts.
    held = [float(e + 1) for e in topology.local_experts(4)]
    expert = with_gradient(held, expert=topology.expert_parallel_size > 1)
    return float(global_grad_norm([dense, expert], topology))


@pytest.mark.parametrize("parallel", (1, 2, 4))
def test_the_gradient_norm_counts_every_expert_once_whatever_the_ep_size(ranks, parallel):
    expected = math.sqrt(9 + 1 + 1 + 4 + 9 + 16)
    got = ranks(4).run(norm, parallel)
    assert got == pytest.approx([expected] * 4, rel=1e-12)
    assert len(set(got)) == 1  # The norms are bit-identical, so all ranks clip equally.


def gradients_by_division(parallel: int, division: str) -> dict[str, Tensor]:
    """Return a layer's gradients after the reductions that an optimizer runs."""
    place = make_topology([4], parallel)
    config = MoEConfig(
        model_dim=4, hidden_dim=3, num_experts=4, shared_experts=1, expert_grad_norm=division
    )
    layer = MoELayer(config, place, seed=1).double()
    generator = torch.Generator().manual_seed(dist.get_rank())
    y, output = layer(torch.randn(9, 4, generator=generator, dtype=torch.float64))
    (y.square().sum() + output.balance_loss).backward()
    for parameter in layer.parameters():
        if not is_expert(parameter):  # Data parallelism averages other gradients.
            dist.all_reduce(parameter.grad)
            parameter.grad /= place.world_size
    rescale_expert_gradients(layer.parameters(), place.world_size)
    reduce_expert_gradients(layer.parameters(), place)
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("world_size, parallel", [(2, 2), (2, 1), (4, 2)])
def test_sqrt_world_size_multiplies_expert_gradients_by_the_root_of_world_size(ranks, world_size, parallel):
    plain, by_root = (
        ranks(world_size).run(gradients_by_division, parallel, division)
        for division in ("world_size", "sqrt_world_size")
    )
    for mine, scaled in zip(plain, by_root, strict=True):
        for name, grad in mine.items():
            factor = world_size**0.5 if name.startswith("experts.") else 1
            assert grad.any(), name
            torch.testing.assert_close(scaled[name], factor * grad, msg=name)


@pytest.mark.parametrize("max_norm, factor", [(1.0, 0.2), (0.0, 1.0), (100.0, 1.0)])
def test_gradients_are_clipped_only_if_the_norm_is_above_max_norm(max_norm, factor):
    parameters = [with_gradient([3.0], expert=False), with_gradient([4.0], expert=True)]
    clip_gradients(parameters, max_norm, global_grad_norm(parameters, Topology()))
    assert [float(each.grad) for each in parameters] == pytest.approx([3 * factor, 4 * factor], rel=1e-6)
