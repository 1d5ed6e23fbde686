"""Sources of offloaded experts: shard files or host memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.shards import ShardedTensor
from fairseq_tutel.inference.expert_buffers import Buffer, BufferLayout, buffers_on_host
from fairseq_tutel.inference.expert_fetcher import Source
from fairseq_tutel.inference.expert_files import FromFiles, ShardFiles
from fairseq_tutel.moe.expert_stack import ExpertStack


class FromHost:
    """The experts of a stack in host memory, one buffer each."""

    def __init__(self, layout: BufferLayout, buffers: Sequence[Buffer]) -> None:
        self.layout, self._buffers = layout, buffers

    def read(self, expert: int, buffer: Buffer) -> None:
        """Copy an expert into a buffer; on a GPU, in the current stream."""
        buffer.memory.copy_(self._buffers[expert].memory, non_blocking=True)


class _FromTensors:
    """The experts of a stack in its tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], stack: ExpertStack) -> None:
        self._tensors = tensors
        self._first = {n: stack.first if len(t) > stack.num_local else 0 for n, t in tensors.items()}
        self.layout = BufferLayout.of({n: (t.dtype, tuple(t.shape[1:]), None) for n, t in tensors.items()})

    def read(self, expert: int, buffer: Buffer) -> None:
        for name, tensor in self._tensors.items():
            buffer.tensors[name].copy_(tensor[self._first[name] + expert].detach())


def source_of(stack: ExpertStack, tensors: Mapping[str, Any], tier: str, files: ShardFiles) -> Source:
    """Return the source of a stack's experts.

    Raises:
        ValueError: the tensors do not fit the stack or the tier.
    """
    if stack.part.slices > 1:
        raise ValueError(
            f"an expert store needs whole experts, but each is sliced over {stack.part.slices} ranks; give "
            f"--moe-expert-parallel-size {stack.config.num_experts} or less."
        )
    for name in stack.names:
        _check_tensor(stack, name, tensors.get(name))
    tensors = {name: tensors[name] for name in stack.names}
    sharded = {name: t for name, t in tensors.items() if isinstance(t, ShardedTensor)}
    if len(sharded) == len(tensors):
        on_disk = FromFiles(files, sharded, stack.first)
        return on_disk if tier == "disk" else _in_host_memory(on_disk, stack.num_local)
    if sharded or tier == "disk":
        raise ValueError(
            "tier (--moe-expert-tier) is disk, but these experts are not in shard files of a checkpoint; "
            "write them with `python -m fairseq_tutel convert sharded`, or choose host."
        )
    return _in_host_memory(_FromTensors(tensors, stack), stack.num_local)


def _check_tensor(stack: ExpertStack, name: str, tensor: Any) -> None:
    own = stack.whole_shape(name)
    fit = {(number, *own) for number in (stack.config.num_experts, stack.num_local)}
    shape = None if tensor is None else tuple(tensor.shape)
    if shape not in fit:
        raise ValueError(
            f"the experts' {name} has shape {shape}, not {(stack.config.num_experts, *own)}; give the "
            "tensors of this layer."
        )
    if isinstance(tensor, Tensor) and tensor.is_meta:
        raise ValueError(
            f"the experts' {name} is on the meta device, as in a layer that is in a store already; add "
            "each layer once, or give its tensors."
        )
    if isinstance(tensor, ShardedTensor) and tensor.slicing.count > 1:
        raise ValueError(
            f"{tensor.root / tensor.folder} has experts in {tensor.slicing.count} slices, but a store "
            "reads whole experts; convert them with `python -m fairseq_tutel convert sharded`."
        )


def _in_host_memory(source: Source, num_local: int) -> FromHost:
    """Read all experts into host memory."""
    buffers = buffers_on_host(source.layout, num_local)
    for expert, buffer in enumerate(buffers):
        source.read(expert, buffer)
    return FromHost(source.layout, buffers)
