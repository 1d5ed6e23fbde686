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
from fairseq_tutel.planning.memory import shard_length
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


def share_of(parameter: nn.Parameter, place: Topology) -> Share:
    """Return how a parameter is shared: an expert among its replicas, any other among all ranks."""
    world = place.world_size
    divisor = world**0.5 if getattr(parameter, "root_scaled", False) else world
    if is_expert(parameter):
        index = place.rank // place.expert_parallel_size
        return Share(place.num_replicas, index, place.replica_group, divisor)
    return Share(world, place.rank, None, divisor)


def own_elements(tensor: Tensor, share: Share) -> Tensor:
    """Return this rank's elements [m] of a contiguous tensor, the last ranks' without padding; a view."""
    length = shard_length(tensor.numel(), share.size)
    return tensor.view(-1)[share.index * length :][:length]


class Piece:
    """A parameter and this rank's shard of it.

    The shard is what an optimizer updates: the parameter's own memory where that is fp32 (or fp64), an fp32
    master where it is half, and in any case a copy in host memory under `offload`.
    """

    def __init__(self, parameter: nn.Parameter, share: Share, offload: bool) -> None:
        self.parameter, self.share = parameter, share
        self.length = shard_length(parameter.numel(), share.size)
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
        self.shard = nn.Parameter(own)

    @property
    def is_padded(self) -> bool:
        """Whether the ranks' shards are more than the parameter."""
        return self.length * self.share.size > self.parameter.numel()


class Bucket:
    """Pieces that travel together.

    Attributes:
        share: of them all.
        gradient: [M], this rank's reduced gradients in the parameters' dtype; None before, and always
            where G is 1: there they stay at their parameters.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces, self.share = list(pieces), pieces[0].share
        self.length = 0
        for piece in self.pieces:
            piece.start = self.length
            self.length += piece.length
        self.gradient: Tensor | None = None

    @property
    def first(self) -> nn.Parameter:
        """A parameter of the bucket's dtype and device."""
        return self.pieces[0].parameter

    @property
    def is_one_tensor(self) -> bool:
        """Whether the bucket is one parameter as it lies in memory."""
        return len(self.pieces) == 1 and not self.pieces[0].is_padded

    def take_gradients(self) -> Tensor:
        """Return the parameters' gradients stacked, [G * M], and free them; zeros for those without."""
        grads = [piece.parameter.grad for piece in self.pieces]
        for piece in self.pieces:
            piece.parameter.grad = None
        if self.is_one_tensor and grads[0] is not None:
            return grads[0].reshape(-1)
        stacked = self.first.new_zeros(self.share.size, self.length)
        for piece, grad in zip(self.pieces, grads, strict=True):
            if grad is not None:
                for row, run in _rows(piece, stacked, grad.reshape(-1)):
                    row.copy_(run)
        return stacked.view(-1)

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's gradient of every piece, flat, in the parameters' dtype."""
        flat = self.gradient
        if flat is not None:
            return [flat[p.start :][: p.shard.numel()] for p in self.pieces]
        grads = [piece.parameter.grad for piece in self.pieces]
        return [None if grad is None else grad.reshape(-1) for grad in grads]

    def free_gradients(self) -> None:
        """Forget the gradients."""
        self.gradient = None
        for piece in self.pieces:
            piece.parameter.grad = piece.shard.grad = None

    def own_weights(self) -> Tensor:
        """Return the shards [M] in the parameters' dtype on their device."""
        device = self.pieces[0].shard.device
        pinned = device.type == "cpu" and self.first.is_cuda
        own = torch.zeros(self.length, dtype=self.first.dtype, device=device, pin_memory=pinned)
        for piece in self.pieces:
            own[piece.start :][: piece.shard.numel()].copy_(piece.shard.data)
        return own.to(self.first.device, non_blocking=True)

    def give_weights(self, stacked: Tensor) -> None:
        """Write weights [G * M] to the parameters."""
        stacked = stacked.view(self.share.size, self.length)
        for piece in self.pieces:
            for row, run in _rows(piece, stacked, piece.parameter.data.view(-1)):
                run.copy_(row)


def _rows(piece: Piece, stacked: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the places of a piece in [G, M], and what of the flat parameter they hold; two at most."""
    columns = stacked[:, piece.start : piece.start + piece.length]
    full, rest = divmod(flat.numel(), max(1, piece.length))
    yield columns[:full], flat[: full * piece.length].view(full, piece.length)
    if rest:
        yield columns[full, :rest], flat[full * piece.length :]


def partition(
    parameters: Iterable[nn.Parameter],
    place: Topology,
    sharded: bool = True,
    offload: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[list[Piece], list[Bucket]]:
    """Cut parameters into shards.

    Args:
        parameters: in the same order on all ranks.
        place: where this rank is.
        sharded: False leaves all whole, for offload alone.
        offload: keep shards in host memory.
        bucket_bytes: of a bucket's parameters, about, in a group of at most BUCKET_RANKS; a parameter with
            more has a bucket of its own.

    Returns:
        The pieces in the order of the parameters, and the buckets in that in which a backward is likely to
        finish them.
    """
    pieces = [Piece(p, share_of(p, place) if sharded else Share(), offload) for p in parameters]
    buckets: list[Bucket] = []
    filling: dict[Any, list[Piece]] = {}
    for piece in reversed(pieces):
        key = (piece.share, piece.parameter.dtype, piece.parameter.device)
        enough = bucket_bytes * min(max(1, piece.share.size // BUCKET_RANKS), MOST_TIMES)
        if _bytes([piece]) >= enough:
            buckets.append(Bucket([piece]))
            continue
        filling.setdefault(key, []).append(piece)
        if _bytes(filling[key]) >= enough:
            buckets.append(Bucket(filling.pop(key)))
    return pieces, buckets + [Bucket(rest) for rest in filling.values()]


def _bytes(pieces: Iterable[Piece]) -> int:
    return sum(p.parameter.numel() * p.parameter.element_size() for p in pieces)
