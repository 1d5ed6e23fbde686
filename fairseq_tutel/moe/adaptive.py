"""Adaptive parallelism: several ways to divide the work of sliced experts, with the same stored weights.

P ranks, E experts, s slices of an expert (P = E * s, or s = 1), r ranks that receive a row; H hidden_dim.
Rank (e, q) of expert e stores slice q for every r, so that a change of r moves no weights:

    r = 0  every rank gathers all experts; no row is sent
    r = 1  an expert's ranks gather it whole; each gets a part of its rows (expert + data)
    r = s  no weights are gathered; every row goes to all ranks of the expert (expert + model)
    else   groups of s / r consecutive ranks gather H / r of the expert; every row goes to r ranks

The source rank of a row sums the partial outputs of r ranks.

Source: Tutel (Hwang et al. 2023), section 3.2.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.comm.call_id import NO_CALL_ID, CallId, compare_later
from fairseq_tutel.comm.collectives import all_to_all, start_all_gather, start_reduce_scatter
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.moe.expert_stack import ExpertStack, MadeWeights, Weights
from fairseq_tutel.ranks.groups import Topology, slice_of

OPERATION = "the gathering of experts' weights"


def allowed_degrees(slices: int, whole_hidden: bool = False) -> tuple[int, ...]:
    """Return every valid r: 0 and the divisors of s; 0 and 1 with `whole_hidden` (a norm over H)."""
    divisors = (r for r in range(1, slices + 1) if slices % r == 0)
    return (0, 1) if whole_hidden else (0, *divisors)


def nearest_degree(degree: int, slices: int, whole_hidden: bool = False) -> int:
    """Return the largest valid r that is at most `degree`, for a layer with fewer slices."""
    return max(r for r in allowed_degrees(slices, whole_hidden) if r <= degree)


def weights_of(
    experts: ExpertStack,
    topology: Topology,
    degree: int,
    device: torch.device,
    call_id: CallId = NO_CALL_ID,
) -> Weights:
    """Return the weights of one forward, gathered if other ranks hold parts of them. Collective.

    If r = `degree` is 0, ranks compare the call ID here, since they exchange no counts then.

    Raises:
        ValueError: the experts were pruned or parametrized, which other ranks cannot gather.
    """
    if topology.expert_parallel_size == 1:
        return experts.weights
    gone = sorted(set(experts.names) - set(experts.expert_parameters()))
    if gone:
        raise ValueError(
            f"the experts' {', '.join(gone)} are no longer parameters, but other ranks must gather them; "
            "undo the torch.nn.utils.prune or parametrize call."
        )
    gathered = gather_weights(experts, topology, degree, call_id)
    return MadeWeights(experts.prepared(gathered, device), of_all=degree == 0)


def gather_weights(
    experts: ExpertStack, topology: Topology, degree: int, call_id: CallId = NO_CALL_ID
) -> dict[str, Any]:
    """Return the tensors that this rank computes with if r = `degree`. Collective, with autograd.

    Backward sums the gradients of all ranks that gathered and keeps those of this rank's slice.

    Raises:
        ValueError: the topology has no groups for this r.
    """
    named = experts.expert_parameters()
    slices = experts.part.slices
    joined = slices if degree == 0 else slices // degree
    group = topology.expert_group if degree == 0 else topology.share_group(slices, degree)
    if degree == 0 and group is not None:
        _compare(call_id, group, next(iter(named.values())).device)
    if group is None:
        tensors: dict[str, Any] = dict(named)
    else:
        stacked = _Gather.apply(group, *named.values())
        tensors = {
            name: _merge(stack, joined, slice_of(parameter).dim)
            for (name, parameter), stack in zip(named.items(), stacked, strict=True)
        }
    if degree > 1:
        part = experts.part.index // joined
        for name in experts.added:
            if name in tensors:
                tensors[name] = _in_place(tensors[name], part, degree)
    return tensors


def _compare(call_id: CallId, group: dist.ProcessGroup, device: torch.device) -> None:
    nothing_P0 = torch.empty(dist.get_world_size(group), 0, dtype=torch.int64, device=device)
    received_PX = all_to_all(call_id.prepended_to(nothing_P0), OPERATION, group)
    compare_later(received_PX[:, 0], OPERATION, group)


def _merge(stack: Tensor, slices: int, dim: int) -> Tensor:
    """Merge [G, e, ...] of G ranks to [experts, ...], with the shards of an expert along `dim`."""
    flat = stack.flatten(0, 1)
    if slices == 1:
        return flat
    by_expert = flat.unflatten(0, (-1, slices))
    return by_expert.movedim(1, dim).flatten(dim, dim + 1)


def _in_place(tensor: Tensor, part: int, number: int) -> Tensor:
    """Return part `part` of `number` at its position in the whole last dimension, with zeros elsewhere."""
    width = tensor.shape[-1]
    return F.pad(tensor, (part * width, (number - 1 - part) * width))


class _Gather(torch.autograd.Function):
    """All-gather of several tensors: each [...] becomes [G, ...] for the group's G ranks."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        number = dist.get_world_size(group)
        stacks = tuple(t.new_empty(number, *t.shape) for t in tensors)
        started = [
            start_all_gather(stack.view(-1), t.contiguous().view(-1), OPERATION, group)
            for stack, t in zip(stacks, tensors, strict=True)
        ]
        for one in started:
            one.wait()
        return stacks

    @staticmethod
    @first_order
    def backward(ctx: Any, *dstacks: Tensor) -> tuple[Tensor | None, ...]:
        outs = [stack.new_empty(stack.shape[1:]) for stack in dstacks]
        what = "the summing of experts' gradients"
        started = [
            start_reduce_scatter(out, stack.contiguous(), what, ctx.group, as_list=True)
            for out, stack in zip(outs, dstacks, strict=True)
        ]
        for one in started:
            one.wait()
        return None, *outs
