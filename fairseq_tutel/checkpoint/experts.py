"""Saves the experts of all ranks in the order of their global IDs.

Either rank 0 gathers and saves all experts, or every rank writes a part of the experts. Rank 0 keeps
gathered experts and their optimizer state in host memory until the files are written. With Adam, the
gathered tensors need three times the bytes of the experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_file
from fairseq_tutel.moe.expert_stack import OWN, ExpertStack, Weights
from fairseq_tutel.parallel import collectives, world
from fairseq_tutel.parallel.groups import Slice, Topology, join, slice_of

# The maximum number of bytes that rank 0 gathers at a time in the memory of its device.
GATHERED_BYTES = 64 * 2**20
_DIFFER = "the ranks' optimizers differ; the last saved checkpoint is complete."
_MAKE_ROOM = "free disk space, or give a --save-dir that all ranks share; the last checkpoint is complete."
_FOLDER = "rank 0's work on the folder of shards"
States = Callable[[nn.Parameter], Mapping[str, Tensor]]


class _Stack(NamedTuple):
    """Describes a stacked tensor [E, ...] of all E experts: a parameter or its optimizer state."""

    layer: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slice


def expert_modules(model: nn.Module) -> list[ExpertStack]:
    """Return the modules that hold the model's experts, in the same order on every rank."""
    return [m for m in model.modules() if isinstance(m, ExpertStack)]


def gather_to_first(tensor: Tensor, topology: Topology, parameter: Tensor | None = None) -> Tensor | None:
    """Gather one parameter of all experts in host memory on rank 0, and return None on other ranks.

    Only the EP group of rank 0 communicates, because its ranks hold every expert once. If `tensor` is
    optimizer state, such as a moment of Adam, `parameter` is the parameter to which the state belongs. The
    ranks exchange at most GATHERED_BYTES at a time, on the parameter's device.
    """
    if topology.rank >= topology.expert_parallel_size:
        return None
    parameter = tensor if parameter is None else parameter
    flat, size = tensor.detach().contiguous().view(-1), topology.expert_parallel_size
    first, group = topology.rank == 0, topology.expert_group
    whole = torch.empty(size, *tensor.shape, dtype=tensor.dtype) if first else None
    step = max(1, GATHERED_BYTES // (size * tensor.element_size()))
    for begin in range(0, len(flat), step):
        run = flat[begin : begin + step].to(parameter.device)
        parts = collectives.gather(run, "the gathering of experts on rank 0", group)
        if whole is not None and parts is not None:
            for own, part in zip(whole.view(size, -1), parts, strict=True):
                own[begin : begin + step] = part
    if whole is None:
        return None
    slicing = slice_of(parameter)
    return join(list(whole), slicing) if slicing.count > 1 else whole.flatten(0, 1)


def gather_experts(model: nn.Module, topology: Topology) -> None:
    """Gather all experts on rank 0, whose next `model.state_dict()` contains them. Collective."""
    if topology.expert_parallel_size == 1:
        return
    for experts in expert_modules(model):
        parameters = experts.expert_parameters().items()
        gathered = {name: gather_to_first(parameter, topology) for name, parameter in parameters}
        if topology.rank == 0:
            experts.save_as({k: v for k, v in gathered.items() if v is not None})


def gather_everywhere(model: nn.Module, topology: Topology) -> int:
    """Gather all experts on every rank, and return the number of gathered bytes per rank. Collective.

    After gather_everywhere(), forward passes need no communication between ranks.
    """
    if topology.expert_parallel_size == 1:
        return 0
    num_bytes = 0
    for experts in expert_modules(model):
        copies = {}
        for name, parameter in experts.expert_parameters().items():
            own = parameter.detach().contiguous()
            parts = collectives.all_gather(own, "the gathering of all experts", topology.expert_group)
            copies[name] = join(list(parts), slice_of(parameter))
        experts.compute_with(Weights(copies, of_all=True))
        num_bytes += sum(copy.nbytes for copy in copies.values())
    return num_bytes


def drop_everywhere(model: nn.Module) -> None:
    """Free the experts that `gather_everywhere` gathered on this rank."""
    for experts in expert_modules(model):
        experts.compute_with(OWN)


def release(model: nn.Module) -> None:
    """Free gathered experts; later state dicts contain only this rank's experts."""
    for experts in expert_modules(model):
        experts.save_as(None)


class _ShardFile(NamedTuple):
    """A shard file of this rank: tensors by key, and each tensor's `_Stack`, expert ID and shard index."""

    name: str
    tensors: dict[str, Tensor]
    places: dict[str, tuple[_Stack, tuple[int, int]]]


def save_in_shards(
    model: nn.Module, topology: Topology, states: States, save_dir: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write all experts and their optimizer state to shard files. Collective.

    Ranks that hold the same experts each write a part of them. The function returns a dict from
    (qualified name of the module, tensor name) to the record of the tensor (see shards.py). A tensor of
    optimizer state has a name of the form PARAMETER.STATE. The next `model.state_dict()` has the records in
    place of the experts' tensors.

    `states` is a function that returns the optimizer's stacked tensors for a parameter. All ranks call the
    function `states` in the same order, because `states` may be a collective.
    """
    folder, written = begin_folder(save_dir), Written()
    for _, file in _files_of(model, topology, states):
        written.write(file, folder)
    records = commit_folder(folder, written)
    save_as_records(model, records)
    return records


class CopiedExperts:
    """Copies of this rank's experts and optimizer state, which a thread saves later.

    All ranks must create a `CopiedExperts` at the same time, since `states` may be a collective.
    """

    def __init__(self, model: nn.Module, topology: Topology, states: States) -> None:
        self.names: list[tuple[str, str]] = []
        self._files: list[_ShardFile] = []
        for names, file in _files_of(model, topology, states):
            self.names += names
            if file is not None:
                copies = {key: value.detach().to("cpu", copy=True) for key, value in file.tensors.items()}
                self._files.append(file._replace(tensors=copies))

    def write(self, folder: Path, check: Callable[[], object]) -> "Written":
        """Write the copied tensors to shard files and free them; call `check` before each file."""
        written = Written()
        while self._files:
            check()
            written.write(self._files.pop(0), folder)
        return written


@dataclass
class Written:
    """The tensors and shard files that one rank wrote, and the error message if writing failed."""

    # For each stacked tensor, its pieces by (expert ID, index of the expert shard).
    pieces: dict[_Stack, dict[tuple[int, int], Piece]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def write(self, file: _ShardFile | None, folder: Path) -> None:
        """Write the shard file of one layer, unless an earlier file could not be written."""
        if file is None or self.error is not None:
            return
        try:
            values = {key: value.detach().cpu().contiguous() for key, value in file.tensors.items()}
            for key, value in values.items():
                stack, place = file.places[key]
                self.pieces.setdefault(stack, {})[place] = Piece(file.name, key, digest(value))
            write_file(values, folder / file.name)
            self.sizes[file.name] = (folder / file.name).stat().st_size
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def begin_folder(save_dir: Path) -> Path:
    """On rank 0, create a folder for new shard files; return its path on all ranks. Collective."""

    def begin() -> str:
        folders.collect(save_dir)
        return folders.begin(save_dir).name

    return save_dir / folders.PARENT / world.run_on_rank_zero(begin, _FOLDER)


def commit_folder(folder: Path, own: Written) -> dict[tuple[str, str], dict[str, Any]]:
    """Give a complete folder of shard files its final name, and return the tensors' records. Collective.

    Raises:
        ValueError: a rank could not write its files; all ranks raise this error.
    """
    everything = gather_written(own)
    return world.run_on_rank_zero(lambda: records_of(everything, folder), _FOLDER)


def gather_written(own: Written, group: dist.ProcessGroup | None = None) -> list[Written]:
    """Return the `Written` of each rank in `group`, or of all ranks if `group` is None. Collective."""
    return world.all_gather_object(own, "the agreement on the shards that were written", group)


def records_of(everything: list[Written], folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Check the sizes of the shard files, rename their folder, and return the records; for rank 0 only."""
    stacks = _joined(everything, folder.parent)
    digests = [f"{p.file} {p.key} {p.digest}" for pieces in stacks.values() for p in pieces.values()]
    sizes = {file: size for written in everything for file, size in written.sizes.items()}
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise OSError(f"{path}, written by another rank, is missing or has the wrong size")
    committed = folders.commit(folder, digests)
    return {
        (stack.layer, stack.name): ShardedTensor(
            root=folder.parent.parent,
            folder=committed,
            shape=stack.shape,
            dtype=stack.dtype,
            slicing=stack.slicing,
            pieces=tuple(pieces[order] for order in sorted(pieces)),
        ).record()
        for stack, pieces in stacks.items()
    }


def save_as_records(model: nn.Module, records: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    """Make the next `model.state_dict()` contain records of shard files instead of experts."""
    for layer, experts in model.named_modules():
        if isinstance(experts, ExpertStack):
            experts.save_as({name: records[layer, name] for name in experts.expert_parameters()})


def _files_of(
    model: nn.Module, topology: Topology, states: States
) -> Iterator[tuple[list[tuple[str, str]], _ShardFile | None]]:
    """Yield the tensor names of each layer, and the shard file that this rank must write, if any."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, ExpertStack)]
    for turn, (layer, stack) in enumerate(layers):
        part, index = stack.part, stack.part.index
        share = _share(part.num_local, topology, turn)
        first, last = part.first + share.start, part.first + share.stop - 1
        slice_name = f".slice-{index}-of-{part.slices}" if part.slices > 1 else ""
        file = _ShardFile(f"{layer}.experts-{first:04d}-{last:04d}{slice_name}.safetensors", {}, {})
        names = []
        for parameter_name, parameter in stack.expert_parameters().items():
            states_of = {f"{parameter_name}.{key}": value for key, value in states(parameter).items()}
            for name, value in {parameter_name: parameter, **states_of}.items():
                names.append((layer, name))
                # Optimizer state of another shape than the parameter is equal for all shards of an expert.
                slicing = stack.slice_of(parameter_name) if value.shape == parameter.shape else Slice()
                if slicing.count == 1 and index > 0:  # The rank of shard 0 writes this state.
                    continue
                shape = list(value.shape)
                shape[slicing.dim] *= slicing.count
                shape[0] = stack.config.num_experts
                of_all = _Stack(layer, name, tuple(shape), value.dtype, slicing)
                for i in share:
                    key = f"{part.first + i}.{name}"
                    file.tensors[key] = value[i]
                    file.places[key] = of_all, (part.first + i, index if slicing.count > 1 else 0)
        yield names, file if file.tensors else None


def _share(num_local: int, topology: Topology, turn: int) -> range:
    """Return the range of local experts that this rank saves; its EP replicas save the other experts.

    `turn` is the index of the layer whose experts are saved. If there are more EP replicas than local
    experts, `turn` decides which replicas write the experts of a layer.
    """
    n = topology.num_replicas
    replica = (topology.rank // topology.expert_parallel_size + turn) % n
    return range(num_local * replica // n, num_local * (replica + 1) // n)


def _joined(everything: list[Written], folder: Path) -> dict[_Stack, dict[tuple[int, int], Piece]]:
    """Merge the pieces of all ranks; raise ValueError if a rank failed or a piece is missing."""
    joined: dict[_Stack, dict[tuple[int, int], Piece]] = {}
    for rank, written in enumerate(everything):
        if written.error is not None:
            problem = f"rank {rank} could not write its experts to {folder} ({written.error})"
            raise ValueError(f"{problem}; {_MAKE_ROOM}")
        for stack, pieces in written.pieces.items():
            joined.setdefault(stack, {}).update(pieces)
    for stack, pieces in joined.items():
        expected = stack.shape[0] * stack.slicing.count
        if len(pieces) != expected:
            what = f"{stack.layer}.{stack.name}"
            raise ValueError(
                f"{len(pieces)} pieces of {what} were written, but {expected} expected: {_DIFFER}"
            )
    return joined
