"""Shards or offloads the state of an ordinary optimizer.

The optimizer has only this rank's elements of each parameter, in fp32. In each update, the caller calls
`finish_backward` after each backward pass, and then `reduce`, `clip`, `step`, `zero_grad`, in this order.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.parallel.collectives import Started, all_reduce
from fairseq_tutel.parallel.gradients import divide_gradients, global_grad_norm, square_norm
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.zero_partition import Bucket, own_elements, partitions_of

# This key of a checkpoint's optimizer state has the fp32 copy of a half-precision weight.
MASTER = "fp32_master"


class GradientReducer:
    """Sums gradients over ranks, bucket by bucket, so that each rank gets the elements that it owns.

    With `eager`, gradients are summed during a backward pass. A bucket is sent when all its gradients exist
    and all earlier buckets are sent. All ranks therefore call the same collectives, even if some ranks do
    not use all parameters. The summed gradients may arrive only at the end of the backward pass.
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
        """Reset the records of sent buckets and of received gradients for the next update."""
        self.sent = 0  # The number of buckets sent in this backward pass.
        self.ready: list[set[int]] = [set() for _ in self.shared]
        self.backwards = 0
        self.is_reduced = False

    def arrived(self, parameter: nn.Parameter, number: int) -> None:
        """Record a parameter's gradient in bucket `number`, and send buckets whose gradients all exist."""
        if number < self.sent:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got another gradient after its gradient "
                "was sent: several checkpointed layers may share it, or the backward pass was not run by "
                "the optimizer; give --moe-zero-stage 1."
            )
        self.ready[number].add(id(parameter))
        while self.sent < len(self.shared):
            if len(self.ready[self.sent]) < len(self.shared[self.sent].partitions):
                break
            self._send()

    def finish_backward(self) -> None:
        """Reduce the gradients that the backward pass has not sent. Collective.

        Unsent gradients remain if this rank did not use all parameters.
        """
        if not self.eager:
            return
        while self.sent < len(self.shared):
            self._send()
        self._finish(self.pending)
        self.backwards += 1
        self.sent, self.ready = 0, [set() for _ in self.shared]

    def reduce(self) -> None:
        """Finish the reduction of all gradients before a step, once per update. Collective."""
        if self.is_reduced:
            return
        self.is_reduced = True
        if self.eager and self.backwards == 0:
            self.finish_backward()
        elif not self.eager:
            for bucket in self.shared:
                self.pending.append(bucket.reduce_gradients())
                # At most two buckets are in memory: one is being stacked, and one is being sent.
                self._finish(self.pending[:-1])
            self._finish(self.pending)
        if self.world_size > 1:
            for bucket in self.alone:
                divide_gradients((p.parameter for p in bucket.partitions), bucket.share.divisor)

    def _send(self) -> None:
        self._finish([each for each in self.pending if each.work.is_completed()])
        self.pending.append(self.shared[self.sent].reduce_gradients())
        self.sent += 1

    def _finish(self, several: Sequence[Started]) -> None:
        for started in list(several):
            started.wait()
            self.pending.remove(started)


def _set_hook(parameter: nn.Parameter, reducer: GradientReducer, number: int) -> None:
    """Register a hook that notifies `reducer` of a parameter's gradients, and remove the previous hook.

    After loading a checkpoint, fairseq builds a new optimizer. Hooks must not notify the old reducer.
    """
    reference = weakref.ref(reducer)

    def hook(parameter: nn.Parameter) -> None:
        if (found := reference()) is not None:
            found.arrived(parameter, number)

    former = getattr(parameter, "zero_hook", None)
    if former is not None:
        former.remove()
    parameter.zero_hook = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]


class ZeroState:
    """Shards the optimizer's state over ranks, reduces gradients, and updates the elements of this rank.

    Args:
        parameters: the model's parameters, in the same order on all ranks.
        stage: the ZeRO stage. Stage 0 shards nothing, and other code reduces gradients. Stage 1 shards the
            state, and reduces gradients after the last backward pass. Stage 2 shards the state, and reduces
            gradients during every backward pass.
        offload: keep this rank's elements, and the optimizer's moments, in host memory.
        bucket_bytes: the approximate bytes of a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        topology: Topology,
        stage: int,
        offload: bool = False,
        **bucket_bytes: int,
    ) -> None:
        self.topology, self.stage = topology, stage
        self.partitions, self.buckets = partitions_of(
            parameters, topology, stage > 0, offload, **bucket_bytes
        )
        self.parameters = [partition.own for partition in self.partitions]
        self.factor: float | Tensor = 1.0
        self.reducer = GradientReducer(self.buckets, topology.world_size, eager=stage == 2)

    def zero_grad(self) -> None:
        """Free all gradients, and prepare the reducer for the next update."""
        for bucket in self.buckets:
            bucket.free_gradients()
        self.reducer.reset()
        self.factor = 1.0

    def multiply(self, factor: float | Tensor) -> None:
        """Make `step` multiply gradients by `factor`, in fp32, so that no gradient underflows."""
        self.factor = self.factor * factor

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients, with the same bits on all ranks. Collective."""
        if self.stage == 0:
            parameters = [partition.parameter for partition in self.partitions]
            return global_grad_norm(parameters, self.topology) * self.factor
        grads: list[Tensor | None] = []
        for bucket in self.buckets:
            grads += bucket.gradients() if bucket.gradient is None else [bucket.gradient]
        square = square_norm([grad for grad in grads if grad is not None], self.buckets[0].first.device)
        if self.topology.world_size > 1:
            all_reduce(square, "the all-reduce of the gradient norm")
        return square.sqrt() * self.factor

    def clip(self, max_norm: float) -> Tensor:
        """Clip gradients to the norm `max_norm`, if positive, and return the norm before clipping."""
        norm = self.norm()
        if max_norm > 0:
            self.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
        """Update this rank's elements bucket by bucket, and gather all weights.

        Collective. Only one bucket's gradients are fp32 at a time. A bucket's weights are sent while the
        next bucket is updated. The function `update` calls `optimizer.step`, which must be elementwise.
        """
        groups = optimizer.param_groups
        # Values in optimizer groups, such as a step count, must change only once per update.
        before = [dict(group) for group in groups]
        members = [{id(own) for own in values["params"]} for values in before]
        pending: Started | None = None
        try:
            for bucket in self.buckets:
                owned = _widen_gradients(bucket, self.factor)
                for group, values, ids in zip(groups, before, members, strict=True):
                    group.clear()
                    group.update(values, params=[own for own in owned if id(own) in ids])
                update()
                bucket.free_gradients()
                former, pending = pending, bucket.gather_weights()
                if former is not None:
                    former.wait()
            if pending is not None:
                pending.wait()
        finally:
            for group, values in zip(groups, before, strict=True):
                group["params"] = values["params"]

    def whole_state(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's complete optimizer state, with an fp32 master copy if there is one.

        Collective over the ranks that own parts of the parameter's state.
        """
        partition, whole = self.partitions[index], dict(state)
        if partition.is_master:
            whole[MASTER] = partition.own.data
        for key in sorted(whole):
            if torch.is_tensor(whole[key]) and whole[key].shape == partition.own.shape:
                whole[key] = partition.whole(whole[key])
        return whole

    @torch.no_grad()
    def own_state(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's complete optimizer state from a checkpoint."""
        partition, own = self.partitions[index], dict(state)
        shape = partition.parameter.shape
        for key, value in own.items():
            # A scalar, such as a step count, is sharded only if the parameter is a scalar.
            if not torch.is_tensor(value) or key == "step" or (value.dim() == 0 and len(shape) > 0):
                continue
            if value.shape != shape:
                raise ValueError(
                    f"the checkpoint's {key} of parameter {index} has shape {tuple(value.shape)}, but this "
                    f"model needs shape {tuple(shape)}; give a checkpoint that all ranks wrote together, "
                    "not a crash file."
                )
            if key == MASTER and not partition.is_master:
                # An fp32 run continues from the master copy of a half-precision run.
                partition.parameter.copy_(value)
            own[key] = own_elements(value.contiguous(), partition.share).clone()
        return own


def _widen_gradients(bucket: Bucket, factor: float | Tensor) -> list[nn.Parameter]:
    """Assign a bucket's gradients, times `factor`, to its partitions' `own`; return these parameters."""
    owned = [partition.own for partition in bucket.partitions]
    device, dtype = owned[0].device, owned[0].dtype
    if isinstance(factor, Tensor):
        factor = factor.to(device)

    def widened(grad: Tensor) -> Tensor:
        if grad.is_cuda and device.type == "cpu":
            # A GPU copies to page-locked memory twice as fast as to other host memory.
            grad = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad)
        return grad.to(dtype).mul_(factor)

    for partition, grad in zip(bucket.partitions, bucket.converted_gradients(widened), strict=True):
        if grad is None and partition.is_master:
            # Missing gradients of master copies become zeros, as in fairseq.
            grad = torch.zeros_like(partition.own)
        partition.own.grad = grad
    return owned
