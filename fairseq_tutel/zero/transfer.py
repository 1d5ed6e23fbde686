"""What crosses ranks under ZeRO: gradients to their owners, updated weights back, state to be saved."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.ranks.guard import guarded
from fairseq_tutel.zero.partition import Bucket, Piece

# torch 2.13 renamed them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transfer:
    """A collective on its way.

    Args:
        work: what torch returned for it.
        what: ends the sentence "rank 1 could not finish …".
        group: its ranks; None for all.
        arrived: called once, after it.
    """

    def __init__(
        self,
        work: dist.Work,
        what: str,
        group: dist.ProcessGroup | None,
        arrived: Callable[[], None],
    ) -> None:
        self.work, self.what, self.group, self.arrived = work, what, group, arrived

    def is_done(self) -> bool:
        """Whether `finish` would not wait for another rank."""
        return self.work.is_completed()

    def finish(self) -> None:
        """Wait for it and use what has come."""
        with guarded(self.what, self.group):
            self.work.wait()
        self.arrived()


def reduce_gradients(bucket: Bucket) -> Transfer:
    """Send the gradients of a bucket to their owners and free them; what arrives is added to its own."""
    share = bucket.share
    stacked = bucket.take_gradients()
    # Before the sum, as data parallel does: scaled fp16 gradients must not pass its largest number.
    stacked.div_(share.divisor)
    reduced = stacked.new_empty(bucket.length)
    work = _reduce_scatter(reduced, stacked, group=share.group, async_op=True)

    def arrived() -> None:
        bucket.gradient = reduced if bucket.gradient is None else bucket.gradient.add_(reduced)

    return Transfer(work, "the reduce-scatter of gradients", share.group, arrived)


@torch.no_grad()
def gather_weights(bucket: Bucket) -> Transfer | None:
    """Bring every rank's updated shards to all; None where nothing has to travel."""
    share = bucket.share
    if share.size == 1:
        if not bucket.pieces[0].is_view:
            bucket.give_weights(bucket.own_weights())
        return None
    own = bucket.own_weights()
    in_place = bucket.is_one_tensor
    whole = bucket.first.data.view(-1) if in_place else own.new_empty(share.size * bucket.length)
    work = _all_gather(whole, own, group=share.group, async_op=True)

    def arrived() -> None:
        if not in_place:
            bucket.give_weights(whole)

    return Transfer(work, "the all-gather of updated weights", share.group, arrived)


@torch.no_grad()
def whole_of(value: Tensor, piece: Piece) -> Tensor:
    """Return a state tensor of a shard's shape as one of its parameter's. Collective over its group."""
    share, parameter = piece.share, piece.parameter
    if share.size == 1:
        return value.view(parameter.shape)
    # A backend of GPUs sees no host memory.
    own = value.new_zeros(piece.length, device=parameter.device)
    own[: value.numel()].copy_(value)
    whole = own.new_empty(share.size * piece.length)
    with guarded("the all-gather of the optimizer's state", share.group):
        _all_gather(whole, own, group=share.group)
    return whole[: parameter.numel()].view(parameter.shape)
