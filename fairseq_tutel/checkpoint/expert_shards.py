"""Experts into shard files: every rank writes the part that it holds, replicas a share of it each.

E experts (e local), P expert_parallel_size, s slices of an expert. Collective, but no expert travels: ranks
tell each other what they wrote.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_file
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Slice, Topology

_DIFFER = "the ranks' optimizers differ; the last saved checkpoint is whole."
# What a rank tells, by layer and tensor: the stack's shape and dtype, its cut, and the pieces that the rank
# wrote, by expert and slice.
Pieces = dict[tuple[int, int], Piece]
Written = dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype, Slice, Pieces]]
States = Callable[[nn.Parameter], Mapping[str, Tensor]]


def write_experts(
    model: nn.Module, topology: Topology, states: States, save_dir: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write all experts of a model, and their optimizer state, beside its checkpoint. Collective.

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
    everything = world.told_by_all(own, "the agreement on the shards that were written")
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
    return {
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
        return world.of_first(action, "rank 0's work on the folder of shards")
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
