"""ZeRO's partition: every rank of a group keeps the optimizer's state of an equal run of elements.

n elements of a parameter, G ranks of its group, m = ceil(n / G) elements of a rank, M of a bucket's rank.
A dense parameter's group is all W ranks, an expert's are its replicas. Parameters of one group and dtype
share buckets, whose collectives are one each: stacked [G, M], row g is what rank g keeps.

Source: Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.comm.gradients import is_expert
from fairseq_tutel.planning.memory import partition_length
from fairseq_tutel.ranks.groups import Topology

BUCKET_BYTES = 25 * 2**20
# Of a group of so many ranks at most. A ring's collective takes a turn for each rank, however little every
# message holds, so that a larger group has larger buckets, to so many times.
BUCKET_RANKS, MOST_TIMES = 64, 8


@dataclass(frozen=True)
class Share:
    """How a parameter is shared.

    Attributes:
        size: G; 1 where its state is whole on every rank.
        index: which of the G this rank is.
        group: these ranks; None for all of the job.
        divisor: of the sum of their gradients.
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    divisor: float = 1


def share_of(parameter: nn.Parameter, topology: Topology) -> Share:
    """Return how a parameter is shared: an expert among its replicas, any other among all ranks."""
    world = topology.world_size
    divisor = world**0.5 if getattr(parameter, "root_scaled", False) else world
    if is_expert(parameter):
        index = topology.rank // topology.expert_parallel_size
        return Share(topology.num_replicas, index, topology.replica_group, divisor)
    return Share(world, topology.rank, None, divisor)


def own_elements(tensor: Tensor, share: Share) -> Tensor:
    """Return this rank's elements [m] of a contiguous tensor, the last ranks' without padding; a view."""
    length = partition_length(tensor.numel(), share.size)
    return tensor.view(-1)[share.index * length :][:length]


class Partition:
    """A parameter and what this rank owns of it.

    `own` is what an optimizer updates: the parameter's memory where that is fp32 (or fp64), an fp32 master
    where it is half, and in any case a copy in host memory under `offload`.
    """

    def __init__(self, parameter: nn.Parameter, share: Share, offload: bool) -> None:
        self.parameter, self.share = parameter, share
        self.length = partition_length(parameter.numel(), share.size)
        self.start = 0  # in its bucket
        # A view needs it; parameters that are not are rare.
        parameter.data = parameter.data.contiguous()
        own = own_elements(parameter.data, share)
        # What an optimizer computes in: fp32, or fp64 for fp64.
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.is_master = wide != parameter.dtype
        self.is_view = not self.is_master and not offload
        if not self.is_view:
            own = own.to("cpu" if offload else own.device, wide, copy=True)
        self.own = nn.Parameter(own)

    @property
    def is_padded(self) -> bool:
        """Whether what the ranks own is more than the parameter."""
        return self.length * self.share.size > self.parameter.numel()


class Bucket:
    """Partitions that travel together.

    Attributes:
        share: of them all.
        gradient: [M], this rank's reduced gradients in the parameters' dtype; None before, and always
            where G is 1: there they stay at their parameters.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.partitions, self.share = list(partitions), partitions[0].share
        self.length = 0
        for partition in self.partitions:
            partition.start = self.length
            self.length += partition.length
        self.gradient: Tensor | None = None

    @property
    def first(self) -> nn.Parameter:
        """A parameter of the bucket's dtype and device."""
        return self.partitions[0].parameter

    @property
    def is_one_tensor(self) -> bool:
        """Whether the bucket is one parameter as it lies in memory."""
        return len(self.partitions) == 1 and not self.partitions[0].is_padded

    def take_gradients(self) -> Tensor:
        """Return the parameters' gradients stacked, [G * M], and free them; zeros for those without."""
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
        """Return this rank's gradient of every partition, flat, in the parameters' dtype."""
        flat = self.gradient
        if flat is not None:
            return [flat[p.start :][: p.own.numel()] for p in self.partitions]
        grads = [partition.parameter.grad for partition in self.partitions]
        return [None if grad is None else grad.reshape(-1) for grad in grads]

    def free_gradients(self) -> None:
        """Forget the gradients."""
        self.gradient = None
        for partition in self.partitions:
            partition.parameter.grad = partition.own.grad = None

    def own_weights(self) -> Tensor:
        """Return what is owned [M] in the parameters' dtype on their device."""
        device = self.partitions[0].own.device
        pinned = device.type == "cpu" and self.first.is_cuda
        own = torch.zeros(self.length, dtype=self.first.dtype, device=device, pin_memory=pinned)
        for partition in self.partitions:
            own[partition.start :][: partition.own.numel()].copy_(partition.own.data)
        return own.to(self.first.device, non_blocking=True)

    def give_weights(self, stacked: Tensor) -> None:
        """Write weights [G * M] to the parameters."""
        stacked = stacked.view(self.share.size, self.length)
        for partition in self.partitions:
            for row, run in _rows(partition, stacked, partition.parameter.data.view(-1)):
                run.copy_(row)


def _rows(partition: Partition, stacked: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return where a partition lies in [G, M], and what of the flat parameter that is; two at most."""
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
    """Cut parameters into partitions.

    Args:
        parameters: in the same order on all ranks.
        topology: where this rank is.
        cut: False leaves all whole, for offload alone.
        offload: keep what is owned in host memory.
        bucket_bytes: of a bucket's parameters, about, in a group of at most BUCKET_RANKS; a parameter with
            more has a bucket of its own.

    Returns:
        The partitions in the order of the parameters, and the buckets in that in which a backward is likely
        to finish them.
    """
    partitions = [
        Partition(p, share_of(p, topology) if cut else Share(), offload) for p in parameters
    ]
    buckets: list[Bucket] = []
    filling: dict[Any, list[Partition]] = {}
    for partition in reversed(partitions):
        key = (partition.share, partition.parameter.dtype, partition.parameter.device)
        enough = bucket_bytes * min(max(1, partition.share.size // BUCKET_RANKS), MOST_TIMES)
        if _bytes([partition]) >= enough:
            buckets.append(Bucket([partition]))
            continue
        filling.setdefault(key, []).append(partition)
        if _bytes(filling[key]) >= enough:
            buckets.append(Bucket(filling.pop(key)))
    return partitions, buckets + [Bucket(rest) for rest in filling.values()]


def _bytes(partitions: Iterable[Partition]) -> int:
    return sum(p.parameter.numel() * p.parameter.element_size() for p in partitions)
