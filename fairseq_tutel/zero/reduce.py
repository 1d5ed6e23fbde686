"""ZeRO's collectives: gradients to their owners, updated weights to all ranks, state for checkpoints.

Gradients are reduced after the last backward pass (stage 1), or during each (stage 2).
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_tutel.comm.collectives import (
    Started,
    all_gather,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
)
from fairseq_tutel.comm.gradients import divide_gradients, square_norm
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.partition import Bucket, Partition


def reduce_gradients(bucket: Bucket) -> Started:
    """Reduce a bucket's gradients to their owners and free them; the result is added to the bucket's."""
    share = bucket.share
    stacked = bucket.take_gradients()
    # Divide before the sum, as data parallel does: scaled fp16 gradients must not overflow.
    stacked.div_(share.divisor)
    reduced = stacked.new_empty(bucket.length)
    started = start_reduce_scatter(reduced, stacked, "the reduce-scatter of gradients", share.group)

    def arrived() -> None:
        former = bucket.gradient
        bucket.gradient = reduced if former is None else former.add_(reduced)

    return started.then(arrived)


@torch.no_grad()
def gather_weights(bucket: Bucket) -> Started | None:
    """Gather every rank's updated weights on all; None if no communication is needed."""
    share = bucket.share
    if share.size == 1:
        if not bucket.partitions[0].is_view:
            bucket.give_weights(bucket.own_weights())
        return None
    own = bucket.own_weights()
    in_place = bucket.is_one_tensor
    whole = bucket.first.data.view(-1) if in_place else own.new_empty(share.size * bucket.length)
    started = start_all_gather(whole, own, "the all-gather of updated weights", share.group)

    def arrived() -> None:
        if not in_place:
            bucket.give_weights(whole)

    return started.then(arrived)


@torch.no_grad()
def whole_of(value: Tensor, partition: Partition) -> Tensor:
    """Gather a state tensor of all of a parameter's owners. Collective over its group."""
    share, parameter = partition.share, partition.parameter
    if share.size == 1:
        return value.view(parameter.shape)
    # A GPU backend cannot read host memory.
    own = value.new_zeros(partition.length, device=parameter.device)
    own[: value.numel()].copy_(value)
    whole = all_gather(own, "the all-gather of the optimizer's state", share.group)
    return whole.view(-1)[: parameter.numel()].view(parameter.shape)


class GradientReducer:
    """Reduces the gradients of buckets to their owners.

    During a backward pass (`eager`) a bucket is sent when all its gradients exist and all earlier buckets
    are sent, so that all ranks call the same collectives, even if some do not use all parameters. Results
    are awaited at the end of the backward pass: another rank may send its buckets only then.
    """

    def __init__(self, buckets: Sequence[Bucket], world_size: int, eager: bool) -> None:
        self.world_size, self.eager = world_size, eager
        self.alone = [bucket for bucket in buckets if bucket.share.size == 1]
        self.shared = [bucket for bucket in buckets if bucket.share.size > 1]
        self.pending: list[Started] = []
        self.reset()
        if eager:
            for number, bucket in enumerate(self.shared):
                for partition in bucket.partitions:
                    _set_hook(partition.parameter, self, number)

    def reset(self) -> None:
        """Reset for the next update."""
        self.sent = 0  # buckets in this backward pass
        self.here: list[set[int]] = [set() for _ in self.shared]
        self.backwards = 0
        self.is_reduced = False

    def arrived(self, parameter: nn.Parameter, number: int) -> None:
        """Record that a parameter of bucket `number` has its gradient; send complete buckets."""
        if number < self.sent:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} gets its gradient in several parts, as one "
                "that several checkpointed layers share, or this backward pass did not use the "
                "optimizer; give --moe-zero-stage 1."
            )
        self.here[number].add(id(parameter))
        while self.sent < len(self.shared):
            if len(self.here[self.sent]) < len(self.shared[self.sent].partitions):
                break
            self._send()

    def finish_backward(self) -> None:
        """Reduce remaining gradients, of ranks that did not use all parameters. Collective."""
        if not self.eager:
            return
        while self.sent < len(self.shared):
            self._send()
        self._finish(self.pending)
        self.backwards += 1
        self.sent, self.here = 0, [set() for _ in self.shared]

    def reduce(self) -> None:
        """Complete all gradients for a step, once per update. Collective."""
        if self.is_reduced:
            return
        self.is_reduced = True
        if self.eager and self.backwards == 0:
            self.finish_backward()
        elif not self.eager:
            for bucket in self.shared:
                self.pending.append(reduce_gradients(bucket))
                # Two at once: the next is stacked during the transfer of one.
                self._finish(self.pending[:-1])
            self._finish(self.pending)
        if self.world_size > 1:
            for bucket in self.alone:
                divide_gradients((p.parameter for p in bucket.partitions), bucket.share.divisor)

    def _send(self) -> None:
        self._finish([each for each in self.pending if each.is_done()])
        self.pending.append(reduce_gradients(self.shared[self.sent]))
        self.sent += 1

    def _finish(self, several: Sequence[Started]) -> None:
        for started in list(several):
            started.wait()
            self.pending.remove(started)


def partitioned_grad_norm(buckets: Sequence[Bucket], topology: Topology) -> Tensor:
    """Return the L2 norm of all ranks' reduced gradients, the same bits on all ranks. Collective."""
    grads: list[Tensor | None] = []
    for bucket in buckets:
        grads += bucket.gradients() if bucket.gradient is None else [bucket.gradient]
    square = square_norm([grad for grad in grads if grad is not None], buckets[0].first.device)
    if topology.world_size > 1:
        all_reduce(square, "the all-reduce of the gradient norm")
    return square.sqrt()


def _set_hook(parameter: nn.Parameter, reducer: GradientReducer, number: int) -> None:
    """Notify a reducer of a parameter's gradients, in place of the previous one.

    fairseq builds another optimizer when it loads a checkpoint; the first one must not be notified.
    """
    reference = weakref.ref(reducer)

    def hook(parameter: nn.Parameter) -> None:
        if (found := reference()) is not None:
            found.arrived(parameter, number)

    former = getattr(parameter, "zero_hook", None)
    if former is not None:
        former.remove()
    parameter.zero_hook = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]
