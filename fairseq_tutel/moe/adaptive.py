"""Adaptive parallelism divides the experts' work among ranks in several ways, with the same stored weights.

A layer uses one value of adaptive_r, written r, for each forward pass. If a rank needs expert weights that
another rank stores, the forward pass gathers these weights.

T is the number of tokens, P the number of ranks, E the number of experts, and s the number of shards of an
expert (P = E * s, or s = 1). H is hidden_dim. Rank (e, q) stores shard q of expert e for every value of r.
Changing adaptive_r therefore moves no stored weights. docs/parallelism.md has a table of the values of r.

Section 3.2 of Tutel (Hwang et al. 2023) describes adaptive parallelism.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.expert_stack import ExpertStack, Weights
from fairseq_tutel.option import require
from fairseq_tutel.parallel.call_id import CallId, compare_later
from fairseq_tutel.parallel.collectives import all_to_all, start_all_gather, start_reduce_scatter
from fairseq_tutel.parallel.groups import Topology, slice_of
from fairseq_tutel.parallel.links import faster_algorithm
from fairseq_tutel.parallel.machine import Machine, typical
from fairseq_tutel.parallel.strategy import Strategy, degree_of

OPERATION = "the all-gather of expert weights"
TOKENS = 4096  # Time predictions assume this number of tokens in a rank's micro-batch by default.
WIRE_BYTES = {"bf16": 2, "fp8": 1}  # The bytes per element of each transfer dtype.


def allowed_degrees(slices: int, whole_hidden: bool = False) -> tuple[int, ...]:
    """Return the valid values of adaptive_r. With `whole_hidden`, no rank may run a part of an expert."""
    divisors = (r for r in range(1, slices + 1) if slices % r == 0)
    return (0, 1) if whole_hidden else (0, *divisors)


def nearest_degree(degree: int, slices: int, whole_hidden: bool = False) -> int:
    """Return the largest valid adaptive_r that does not exceed `degree`."""
    return max(r for r in allowed_degrees(slices, whole_hidden) if r <= degree)


def weights_of(
    experts: ExpertStack,
    topology: Topology,
    degree: int,
    device: torch.device,
    call_id: CallId | None = None,
) -> Weights:
    """Gather and return the expert weights that this rank needs if adaptive_r is `degree`. Collective.

    The backward pass sums the gradients of all ranks that gathered the weights. Each rank keeps the
    gradients of its expert shard. If `call_id` is given, the call IDs of all ranks are compared.
    """
    named, slices = experts.expert_parameters(), experts.part.slices
    # Without this check, a pruned or parametrized bias would be ignored silently.
    message = "a torch.nn.utils.prune or parametrize call changed the experts, but other ranks gather them"
    require(named.keys() >= set(experts.names), f"{message}; undo that call.")
    joined = slices if degree == 0 else slices // degree
    group = topology.expert_group if degree == 0 else topology.share_group(slices, degree)
    tensors: dict[str, Any] = dict(named)
    if call_id is not None and group is not None:
        nothing_P0 = torch.empty(dist.get_world_size(group), 0, dtype=torch.int64, device=experts.device)
        received_PX = all_to_all(call_id.prepended_to(nothing_P0), OPERATION, group)
        compare_later(received_PX[:, 0], OPERATION, group)
    if group is not None:
        for name, stack in zip(named, _Gather.apply(group, *named.values()), strict=True):
            tensors[name] = _merge(stack, joined, slice_of(named[name]).dim)
    if degree > 1:
        part = experts.part.index // joined
        for name in filter(tensors.__contains__, experts.added):
            # Each of the `degree` ranks that get a row adds a different part of the bias to the output.
            width = tensors[name].shape[-1]
            tensors[name] = F.pad(tensors[name], (part * width, (degree - 1 - part) * width))
    return Weights(experts.prepared(tensors, device), of_all=degree == 0)


def _merge(stack: Tensor, slices: int, dim: int) -> Tensor:
    """Join the experts' shards from G ranks, [G, e, ...], to complete experts, [experts, ...]."""
    flat = stack.flatten(0, 1)
    if slices == 1:
        return flat
    by_expert = flat.unflatten(0, (-1, slices))
    return by_expert.movedim(1, dim).flatten(dim, dim + 1)


class _Gather(torch.autograd.Function):
    """All-gather several tensors in one autograd node. A tensor [...] becomes [G, ...] for G ranks."""

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
        what = "the reduce-scatter of expert gradients"
        started = [
            start_reduce_scatter(out, stack.contiguous(), what, ctx.group, as_list=True)
            for out, stack in zip(outs, dstacks, strict=True)
        ]
        for one in started:
            one.wait()
        return None, *outs


def static_strategy(
    config: MoEConfig,
    topology: Topology,
    tokens: int = TOKENS,
    machine: Machine | None = None,
    element_bytes: int = 4,
) -> Strategy:
    """Return the execution strategy (adaptive_r, all-to-all, overlap) that a layer's configuration sets.

    If the all-to-all algorithm is `auto`, choose the algorithm that a hardware profile predicts to be
    faster. The predicted times are for `tokens` tokens per rank and `element_bytes` bytes per row element.
    If `machine` is None, the typical hardware profile of this device is used.
    """
    algorithm, grid = config.a2a_algorithm, topology.grid
    slices, overlap = topology.slices(config.num_experts), config.a2a_ffn_overlap_degree
    degree = static_degree(config, slices)
    if algorithm == "auto":
        algorithm = "linear"
        if grid is not None:
            width = min(WIRE_BYTES.get(config.a2a_dtype, element_bytes), element_bytes)
            num_bytes = max(degree, 1) * tokens * config.top_k * config.model_dim * width / overlap
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            algorithm = faster_algorithm(machine or typical(gpu), grid.nodes, grid.local, num_bytes)
    return Strategy(adaptive_r=degree, overlap=overlap, algorithm=algorithm)


def static_degree(config: MoEConfig, slices: int) -> int:
    """Return the configured adaptive_r, limited to `slices`. Raise ValueError if adaptive_r is invalid."""
    degree = config.adaptive_r
    name, value = "adaptive_r", str(degree)
    if degree < 0:
        name, value = "parallel_type", config.parallel_type
        degree = degree_of(config.parallel_type, slices) or 0  # MoEConfig checks parallel_type.
    degree = min(degree, slices)
    given = f"{label_of(name)} is {value}"
    require(
        degree in allowed_degrees(slices),
        f"{given}, but each expert is split over {slices} ranks; give 0 or a divisor of {slices}.",
    )
    require(
        degree <= 1 or not config.hidden_layer_norm,
        f"{given}, which splits the hidden dimension, but the layer norm of --scale-fc needs the complete "
        "hidden dimension; give 0 or 1.",
    )
    return degree


def is_tuned(config: MoEConfig) -> bool:
    """Return whether the tuner chooses adaptive_r, the all-to-all algorithm or the overlap degree."""
    return "auto" in (config.adaptive, config.parallel_type)
