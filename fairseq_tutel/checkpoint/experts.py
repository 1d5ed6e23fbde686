"""Experts of all ranks in a checkpoint: gathered by global expert id to rank 0, or written by every rank.

E experts (e local), P expert_parallel_size, s slices of an expert.

`gather_to_first` runs tensor by tensor, a part at a time. Rank 0 keeps, in host memory until the next
training step, one full copy of what it gathered: E / e times the local experts, and as much again for every
optimizer state tensor of their shape (three times the experts with Adam).

`save_in_shards` lets every rank write the part that it holds, replicas a share of it each: a file of a
layer (`_write_layer`), whose form is in `shards`, in a folder of which `folders` knows the life.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_file
from fairseq_tutel.comm import collectives
from fairseq_tutel.moe.expert_stack import OWN, ExpertStack, MadeWeights
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Slice, Topology, join, slice_of

# Of all ranks' parts that stand on rank 0's device at once.
GATHERED_BYTES = 64 * 2**20
_DIFFER = "the ranks' optimizers differ; the last saved checkpoint is whole."
# What a rank tells, by layer and tensor: the stack's shape and dtype, its cut, and the pieces that the rank
# wrote, by expert and slice.
Pieces = dict[tuple[int, int], Piece]
Written = dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype, Slice, Pieces]]
States = Callable[[nn.Parameter], Mapping[str, Tensor]]


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
        parts = collectives.gather(run, "the gathering of experts on rank 0", group)
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


def save_in_shards(
    model: nn.Module, topology: Topology, states: States, save_dir: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write all experts and their optimizer state into shard files beside a checkpoint. Collective.

    The next `model.state_dict()` says where they are. No expert travels: ranks tell each other what they
    wrote.

    Args:
        model: with expert stacks.
        topology: of this rank.
        states: the optimizer's tensors of a parameter of experts, stacked as it is; may be collective, and
            is called for the same parameters in the same order on all ranks.
        save_dir: where the checkpoint will stand, one folder for all ranks.

    Returns:
        By (qualified name of the stack, tensor) the record to save in its place. A state's tensor is the
        parameter's name, a dot and the state's.

    Raises:
        ValueError: on all ranks, where one could not write.
    """
    folder = save_dir / folders.PARENT / _first_rank(lambda: _begin(save_dir))
    own = _write_own(model, topology, states, folder)
    everything = world.all_gather_object(own, "the agreement on the shards that were written")
    _refuse_failure(folder.parent, [error for _, _, error, _ in everything])
    tensors = _joined([written for written, *_ in everything])
    if any(names != len(tensors) for *_, names in everything):
        raise ValueError(f"ranks wrote other tensors than they have: {_DIFFER}")
    names = [
        f"{p.file} {p.key} {p.digest}"
        for _, _, _, pieces in tensors.values()
        for p in pieces.values()
    ]
    sizes = {file: size for _, sizes, *_ in everything for file, size in sizes.items()}
    committed = _first_rank(lambda: _commit(folder, names, sizes))
    records = {
        key: ShardedTensor(
            root=save_dir,
            folder=committed,
            shape=shape,
            dtype=dtype,
            slicing=slicing,
            pieces=tuple(pieces[order] for order in sorted(pieces)),
        ).record()
        for key, (shape, dtype, slicing, pieces) in tensors.items()
    }
    for layer, experts in model.named_modules():
        if isinstance(experts, ExpertStack):
            experts.save_as({name: records[layer, name] for name in experts.expert_parameters()})
    return records


def _begin(save_dir: Path) -> str:
    folders.collect(save_dir)
    return folders.begin(save_dir).name


def _commit(folder: Path, names: list[str], sizes: dict[str, int]) -> str:
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise OSError(f"{path}, which another rank wrote, is not there as it was written")
    return folders.commit(folder, names)


def _first_rank(action: Callable[[], Any]) -> Any:
    """Return on all ranks what rank 0 did; its error is everybody's."""
    try:
        return world.run_on_rank_zero(action, "rank 0's work on the folder of shards")
    except ValueError as error:
        raise ValueError(
            f"rank 0 could not prepare or commit the folder of shards ({error}); make room, or give a "
            "--save-dir that all ranks share; the last saved checkpoint is whole."
        ) from error


def _refuse_failure(folder: Path, errors: list[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(
                f"rank {rank} could not write its experts to {folder} ({error}); "
                "make room, or give a --save-dir that all ranks share; the last saved checkpoint is whole."
            )


def _write_own(
    model: nn.Module, topology: Topology, states: States, folder: Path
) -> tuple[Written, dict[str, int], str | None, int]:
    """Write this rank's share, a file a layer.

    Returns:
        What was written; its files' sizes; why it was not, if so; how many tensors the ranks share.
    """
    written: Written = {}
    sizes: dict[str, int] = {}
    failed: str | None = None
    names = 0
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, ExpertStack)]
    for turn, (layer, stack) in enumerate(layers):
        tensors: dict[str, tuple[Tensor, Slice]] = {}
        for name, parameter in stack.expert_parameters().items():
            slicing = stack.slice_of(name)
            tensors[name] = (parameter, slicing)
            for key, value in states(parameter).items():
                # What has not the parameter's shape, such as a scale, is the same for all slices.
                cut = slicing if value.shape == parameter.shape else Slice()
                tensors[f"{name}.{key}"] = (value, cut)
        names += len(tensors)
        if failed is None:  # after an error no more is written, but others may wait in `states`
            try:
                share = _share(stack.part.num_local, topology, turn)
                written |= _write_layer(layer, stack, tensors, share, folder, sizes)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
    return written, sizes, failed, names


def _write_layer(
    layer: str,
    stack: ExpertStack,
    tensors: dict[str, tuple[Tensor, Slice]],
    share: range,
    folder: Path,
    sizes: dict[str, int],
) -> Written:
    part, index = stack.part, stack.part.index
    first, last = part.first + share.start, part.first + share.stop - 1
    slice_name = f".slice-{index}-of-{part.slices}" if part.slices > 1 else ""
    file = f"{layer}.experts-{first:04d}-{last:04d}{slice_name}.safetensors"
    written: Written = {}
    values: dict[str, Tensor] = {}
    for name, (stacked, slicing) in tensors.items():
        shape = list(stacked.shape)
        shape[slicing.dim] *= slicing.count
        shape[0] = stack.config.num_experts
        pieces: Pieces = {}
        if not share or (slicing.count == 1 and index > 0):  # the same in all slices
            continue
        written[layer, name] = (tuple(shape), stacked.dtype, slicing, pieces)
        for i in share:
            value = stacked[i].detach().cpu().contiguous()
            expert = part.first + i
            key = f"{expert}.{name}"
            values[key] = value
            pieces[expert, index if slicing.count > 1 else 0] = Piece(file, key, digest(value))
    if values:
        write_file(values, folder / file)
        sizes[file] = (folder / file).stat().st_size
    return written


def _share(num_local: int, topology: Topology, turn: int) -> range:
    """Return which of the local experts this rank writes: its replicas write the others.

    Args:
        num_local: e.
        topology: of this rank.
        turn: of the layer. Where replicas are more than experts, those that write are others in the next.
    """
    n = topology.num_replicas
    replica = (topology.rank // topology.expert_parallel_size + turn) % n
    return range(num_local * replica // n, num_local * (replica + 1) // n)


def _joined(parts: list[Written]) -> Written:
    """Put together what the ranks wrote."""
    joined: Written = {}
    for part in parts:
        for key, (shape, dtype, slicing, pieces) in part.items():
            joined.setdefault(key, (shape, dtype, slicing, {}))[3].update(pieces)
    for (layer, name), (shape, _, slicing, pieces) in joined.items():
        if len(pieces) != shape[0] * slicing.count:
            raise ValueError(
                f"{len(pieces)} pieces of {layer}.{name} were written, not {shape[0] * slicing.count}: "
                f"{_DIFFER}"
            )
    return joined
