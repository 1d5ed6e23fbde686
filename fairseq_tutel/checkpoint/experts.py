"""Checkpoints of experts: gathered by global expert id to rank 0, or written by every rank; cut at load.

The gathering is collective and runs tensor by tensor, a piece at a time. Rank 0 keeps, in host memory until
the next training step, one full copy of what it gathered: E / e times the local experts, and as much again
for every optimizer state tensor of their shape (three times the experts with Adam).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint.expert_shards import States, write_experts
from fairseq_tutel.comm import collectives
from fairseq_tutel.moe.expert_stack import OWN, ExpertStack, MadeWeights
from fairseq_tutel.ranks.groups import Slice, Topology, join, slice_of

# Of all ranks' parts that stand on rank 0's device at once.
GATHERED_BYTES = 64 * 2**20


def expert_modules(model: nn.Module) -> list[ExpertStack]:
    """Return the model's expert stacks in module order, the same on every rank."""
    return [m for m in model.modules() if isinstance(m, ExpertStack)]


def gather_to_first(
    tensor: Tensor, topology: Topology, slicing: Slice | None = None
) -> Tensor | None:
    """Put the expert group's parts of a parameter together; on rank 0, in host memory, else None.

    A tensor of a parameter's shape, such as a moment, is cut as the parameter is: give `slicing` then.

    Only the expert group of rank 0 communicates: its ranks hold every expert once.
    """
    if topology.rank >= topology.expert_parallel_size:
        return None
    slicing = slice_of(tensor) if slicing is None else slicing
    flat, size = tensor.detach().contiguous().view(-1), topology.expert_parallel_size
    first, group = topology.rank == 0, topology.expert_group
    whole = torch.empty(size, *tensor.shape, dtype=tensor.dtype) if first else None
    step = max(1, GATHERED_BYTES // (size * tensor.element_size()))
    for begin in range(0, len(flat), step):
        run = flat[begin : begin + step]
        parts = collectives.gather_to_first(run, "the gathering of experts on rank 0", group)
        if whole is not None and parts is not None:
            for own, part in zip(whole.view(size, -1), parts, strict=True):
                own[begin : begin + step] = part
    if whole is None:
        return None
    return join(list(whole), slicing) if slicing.count > 1 else whole.flatten(0, 1)


def gather_experts(model: nn.Module, topology: Topology) -> None:
    """Make the next `model.state_dict()` on rank 0 hold all experts. Collective."""
    if topology.expert_parallel_size == 1:
        return
    for experts in expert_modules(model):
        gathered = {
            name: gather_to_first(parameter, topology)
            for name, parameter in experts.expert_parameters().items()
        }
        if topology.rank == 0:
            experts.save_as({k: v for k, v in gathered.items() if v is not None})


def save_in_shards(
    model: nn.Module, topology: Topology, states: States, save_dir: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write all experts into shard files; the next `model.state_dict()` says where. Collective.

    Args and errors are those of `comm.shards.write_experts`, and so are the records that it returns.
    """
    records = write_experts(model, topology, states, save_dir)
    for layer, experts in model.named_modules():
        if isinstance(experts, ExpertStack):
            experts.save_as({name: records[layer, name] for name in experts.expert_parameters()})
    return records


def drop_gathered(model: nn.Module) -> None:
    """Free what was kept for a checkpoint; a later state dict holds the local slice again."""
    for experts in expert_modules(model):
        experts.save_as(None)


def gather_everywhere(model: nn.Module, topology: Topology) -> int:
    """Give every rank a full copy of all experts, so that it can run without the others. Collective.

    Returns:
        The bytes that the copies take on each rank until `drop_everywhere`.
    """
    if topology.expert_parallel_size == 1:
        return 0
    num_bytes = 0
    for experts in expert_modules(model):
        copies = {
            name: _all_gather(parameter, topology)
            for name, parameter in experts.expert_parameters().items()
        }
        experts.compute_with(MadeWeights(copies, of_all=True))
        num_bytes += sum(copy.numel() * copy.element_size() for copy in copies.values())
    return num_bytes


def drop_everywhere(model: nn.Module) -> None:
    """Return to one slice of the experts per rank."""
    for experts in expert_modules(model):
        experts.compute_with(OWN)


def _all_gather(tensor: Tensor, topology: Topology) -> Tensor:
    slicing, tensor = slice_of(tensor), tensor.detach().contiguous()
    what = "the gathering of experts on every rank"
    return join(list(collectives.all_gather(tensor, what, topology.expert_group)), slicing)
