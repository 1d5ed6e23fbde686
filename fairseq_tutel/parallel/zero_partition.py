"""ZeRO partitions, in which each rank keeps the optimizer state of an equal part of each parameter.

For a parameter with n elements and a group of G ranks, each rank has m = ceil(n / G) elements. Parameters
with the same group and dtype share buckets, and each bucket needs one collective. A bucket has M elements
per rank and is stacked as [G, M], where row g belongs to rank g. ZeRO is from Rajbhandari et al. 2020.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.parallel.collectives import Started, all_gather, start_all_gather, start_reduce_scatter
from fairseq_tutel.parallel.gradients import gradient_divisor, is_expert
from fairseq_tutel.parallel.groups import Topology

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Share:
    """The group of G = `size` ranks over which a parameter's optimizer state is sharded.

    `group` is None for the group of all ranks.
    """

    size: int = 1
    index: int = 0  # This rank's index in the group.
    group: dist.ProcessGroup | None = None
    divisor: float = 1  # The sum of gradients is divided by this number.


def share_of(parameter: nn.Parameter, topology: Topology) -> Share:
    """Return the ranks that shard a parameter's state: EP replicas for an expert, otherwise all ranks."""
    world = topology.world_size
    divisor = gradient_divisor(parameter, world)
    if is_expert(parameter):
        index = topology.rank // topology.expert_parallel_size
        return Share(topology.num_replicas, index, topology.replica_group, divisor)
    return Share(world, topology.rank, None, divisor)


def own_elements(tensor: Tensor, share: Share) -> Tensor:
    """Return this rank's elements of a contiguous tensor, as a view of at most m elements."""
    length = -(-tensor.numel() // share.size)  # with padding
    return tensor.view(-1)[share.index * length :][:length]


class Partition:
    """A parameter, and those of its elements that this rank updates (`own`).

    `own` is a view of an fp32 (or fp64) parameter, or an fp32 master copy of a half-precision parameter.
    With `offload`, `own` is a copy in host memory.
    """

    def __init__(self, parameter: nn.Parameter, share: Share, offload: bool) -> None:
        self.parameter, self.share = parameter, share
        self.length = -(-parameter.numel() // share.size)  # The number of elements per rank, with padding.
        self.num_bytes = parameter.numel() * parameter.element_size()  # The complete parameter's bytes.
        self.start = 0
        # Views need contiguous memory.
        parameter.data = parameter.data.contiguous()
        own = own_elements(parameter.data, share)
        # The optimizer's dtype is fp32, or fp64 for fp64 parameters.
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.is_master = wide != parameter.dtype
        self.is_view = not self.is_master and not offload
        if not self.is_view:
            own = own.to("cpu" if offload else own.device, wide, copy=True)
        self.own = nn.Parameter(own)

    def put_at(self, start: int) -> None:
        """Set the element of its communication bucket at which this partition starts."""
        self.start = start

    @torch.no_grad()
    def whole(self, value: Tensor) -> Tensor:
        """Gather a parameter's complete optimizer state tensor from all ranks of the group. Collective.

        The gathered tensor is on the device of `value`, which is the host for an offloaded state.
        """
        share, parameter = self.share, self.parameter
        if share.size == 1:
            return value.view(parameter.shape)
        # A GPU backend of torch.distributed cannot read host memory.
        own = value.new_zeros(self.length, device=parameter.device)
        own[: value.numel()].copy_(value)
        whole = all_gather(own, "the all-gather of the optimizer's state", share.group)
        return whole.view(-1)[: parameter.numel()].view(parameter.shape).to(value.device)


class Bucket:
    """A bucket is a list of partitions whose gradients, or weights, are sent in one collective."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.partitions, self.share = list(partitions), partitions[0].share
        self.length = 0
        for partition in self.partitions:
            partition.put_at(self.length)
            self.length += partition.length
        # This tensor has the reduced gradients [M] in the parameters' dtype. The tensor is None before the
        # reduction, and always if G is 1, because parameters then keep their gradients.
        self.gradient: Tensor | None = None
        # All parameters of the bucket have the dtype and device of this parameter.
        self.first = self.partitions[0].parameter
        # Without padding, a single parameter and its gradient are sent and received without a copy.
        self.is_one_tensor = len(self.partitions) == 1 and (
            self.length * self.share.size == self.first.numel()
        )

    def reduce_gradients(self) -> Started:
        """Start a reduce-scatter of the bucket's gradients, which adds this rank's sums to `gradient`."""
        share = self.share
        stacked = self._take_gradients()
        # As in data parallelism, divide before the sum, so that scaled fp16 gradients do not overflow.
        stacked.div_(share.divisor)
        reduced = stacked.new_empty(self.length)
        started = start_reduce_scatter(reduced, stacked, "the reduce-scatter of gradients", share.group)

        def arrived() -> None:
            self.gradient = reduced if self.gradient is None else self.gradient.add_(reduced)

        return started.then(arrived)

    def _take_gradients(self) -> Tensor:
        """Return the stacked gradients [G * M], with zeros for missing gradients. Free the originals."""
        grads = [partition.parameter.grad for partition in self.partitions]
        for partition in self.partitions:
            partition.parameter.grad = None
        if self.is_one_tensor and grads[0] is not None:
            return grads[0].reshape(-1)
        stacked = self.first.new_zeros(self.share.size, self.length)
        for partition, grad in zip(self.partitions, grads, strict=True):
            if grad is not None:
                for row, run in _rows(partition, stacked, grad.reshape(-1)):
                    row.copy_(run)
        return stacked.view(-1)

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's part of each parameter's gradient, flat and in the parameter's dtype."""
        flat = self.gradient
        if flat is not None:
            return [flat[p.start :][: p.own.numel()] for p in self.partitions]
        grads = [partition.parameter.grad for partition in self.partitions]
        return [None if grad is None else grad.reshape(-1) for grad in grads]

    def converted_gradients(self, convert: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Apply `convert` to this rank's gradients (all at once if reduced), and return the results."""
        if self.gradient is not None:
            self.gradient = convert(self.gradient)
            return self.gradients()
        return [None if grad is None else convert(grad) for grad in self.gradients()]

    def free_gradients(self) -> None:
        """Free the gradients of all parameters and partitions in this bucket."""
        self.gradient = None
        for partition in self.partitions:
            partition.parameter.grad = partition.own.grad = None

    @torch.no_grad()
    def gather_weights(self) -> Started | None:
        """Start to gather the updated weights on all ranks. Return None if no communication is needed."""
        share = self.share
        if share.size == 1:
            if not self.partitions[0].is_view:
                self._set_weights(self._own_weights())
            return None
        own = self._own_weights()
        whole = self.first.data.view(-1) if self.is_one_tensor else own.new_empty(share.size * self.length)
        started = start_all_gather(whole, own, "the all-gather of updated weights", share.group)
        return started if self.is_one_tensor else started.then(lambda: self._set_weights(whole))

    def _own_weights(self) -> Tensor:
        """Return this rank's updated elements [M] in the dtype and on the device of the parameters."""
        device = self.partitions[0].own.device
        pinned = device.type == "cpu" and self.first.is_cuda
        own = torch.zeros(self.length, dtype=self.first.dtype, device=device, pin_memory=pinned)
        for partition in self.partitions:
            own[partition.start :][: partition.own.numel()].copy_(partition.own.data)
        return own.to(self.first.device, non_blocking=True)

    @torch.no_grad()
    def _set_weights(self, stacked: Tensor) -> None:
        """Copy gathered weights [G * M] to the parameters."""
        stacked = stacked.view(self.share.size, self.length)
        for partition in self.partitions:
            for row, run in _rows(partition, stacked, partition.parameter.data.view(-1)):
                run.copy_(row)


def _rows(partition: Partition, stacked: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one or two pairs of views: elements in a bucket [G, M], and these elements in a parameter."""
    columns = stacked[:, partition.start : partition.start + partition.length]
    full, rest = divmod(flat.numel(), max(1, partition.length))
    yield columns[:full], flat[: full * partition.length].view(full, partition.length)
    if rest:
        yield columns[full, :rest], flat[full * partition.length :]


def partitions_of(
    parameters: Iterable[nn.Parameter],
    topology: Topology,
    cut: bool = True,
    offload: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[list[Partition], list[Bucket]]:
    """Return one partition for each parameter, and the communication buckets of these partitions.

    Buckets are in the order in which a backward pass probably computes their gradients. Without `cut`, no
    parameter is sharded, as in offload without ZeRO. A bucket has about `bucket_bytes` bytes. A parameter
    with more bytes gets a separate bucket.
    """
    partitions = [Partition(p, share_of(p, topology) if cut else Share(), offload) for p in parameters]
    buckets: list[Bucket] = []
    filling: dict[Any, list[Partition]] = {}
    for partition in reversed(partitions):
        key = (partition.share, partition.parameter.dtype, partition.parameter.device)
        if partition.num_bytes >= bucket_bytes:
            buckets.append(Bucket([partition]))
            continue
        filling.setdefault(key, []).append(partition)
        if sum(each.num_bytes for each in filling[key]) >= bucket_bytes:
            buckets.append(Bucket(filling.pop(key)))
    return partitions, buckets + [Bucket(rest) for rest in filling.values()]
