"""The state of partitioned or offloaded parameters, between a model and an ordinary optimizer.

The optimizer has this rank's elements of each parameter, in fp32. An update consists of backward passes,
each followed by `finish_backward`; `reduce`; `norm` and `multiply` to clip; `step`; `zero_grad`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.comm.collectives import Started, all_reduce
from fairseq_tutel.comm.gradients import divide_gradients, global_grad_norm, square_norm
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.partition import Bucket, own_elements, partitions_of

# Key in a checkpoint's optimizer state: the fp32 copy of a half-precision weight.
MASTER = "fp32_master"


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
                self.pending.append(bucket.reduce_gradients())
                # Two at once: the next is stacked during the transfer of one.
                self._finish(self.pending[:-1])
            self._finish(self.pending)
        if self.world_size > 1:
            for bucket in self.alone:
                divide_gradients((p.parameter for p in bucket.partitions), bucket.share.divisor)

    def _send(self) -> None:
        self._finish([each for each in self.pending if each.is_done()])
        self.pending.append(self.shared[self.sent].reduce_gradients())
        self.sent += 1

    def _finish(self, several: Sequence[Started]) -> None:
        for started in list(several):
            started.wait()
            self.pending.remove(started)


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


class ZeroState:
    """The partitions of a model's parameters, in the same order on all ranks, and their updates.

    Args:
        stage: 0: whole on every rank, and gradients are reduced elsewhere; 1: sharded, gradients are
            reduced after the last backward pass; 2: they are reduced during every backward pass.
        offload: keep this rank's elements, and the optimizer's moments, in host memory.
        bucket_bytes: see `partitions_of`.
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
        """Free the gradients."""
        for bucket in self.buckets:
            bucket.free_gradients()
        self.reducer.reset()
        self.factor = 1.0

    def finish_backward(self) -> None:
        """Finish a backward pass. Collective under stage 2."""
        self.reducer.finish_backward()

    def reduce(self) -> None:
        """Reduce gradients after an update's last backward pass (stages 1, 2); idempotent. Collective."""
        self.reducer.reduce()

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients when they are converted to fp32: scaled half ones must not underflow."""
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
        """Scale the gradients to a norm of at most `max_norm`, if that is positive; return the norm."""
        norm = self.norm()
        if max_norm > 0:
            self.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
        """Update this rank's elements bucket by bucket, and gather the weights on all ranks. Collective.

        Only one bucket's gradients are fp32 at a time. Its weights are sent while the next one is updated.
        `optimizer` is elementwise; `update` calls its `step`.
        """
        groups = optimizer.param_groups
        # Values in groups (a step, the last rate) must change once per update, not per bucket.
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
        """Return a parameter's whole state, with its fp32 master, if any. Collective over its owners."""
        partition, whole = self.partitions[index], dict(state)
        if partition.is_master:
            whole[MASTER] = partition.own.data
        for key in sorted(whole):
            if torch.is_tensor(whole[key]) and whole[key].shape == partition.own.shape:
                whole[key] = partition.whole(whole[key])
        return whole

    @torch.no_grad()
    def own_state(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's whole state, which any run may have saved."""
        partition, own = self.partitions[index], _without_fp16_stats(state)
        shape = partition.parameter.shape
        for key, value in own.items():
            # The number of steps may be a tensor; a parameter may have no dimensions.
            if not torch.is_tensor(value) or key == "step" or (value.dim() == 0 and len(shape) > 0):
                continue
            if value.shape != shape:
                raise ValueError(
                    f"the checkpoint's {key} of parameter {index} has shape {tuple(value.shape)} but this "
                    f"model needs {tuple(shape)}; give a file that all ranks wrote together, not a crash "
                    "file."
                )
            if key == MASTER and not partition.is_master:
                # From a half run: the weights continue from the master on all ranks, which all read it.
                partition.parameter.copy_(value)
            own[key] = own_elements(value.contiguous(), partition.share).clone()
        return own


def _widen_gradients(bucket: Bucket, factor: float | Tensor) -> list[nn.Parameter]:
    """Set the gradients of a bucket's elements, in their dtype and memory, times a factor."""
    owned = [partition.own for partition in bucket.partitions]
    device, dtype = owned[0].device, owned[0].dtype
    if isinstance(factor, Tensor):
        factor = factor.to(device)

    def widened(grad: Tensor) -> Tensor:
        if grad.is_cuda and device.type == "cpu":
            # Copied before conversion, to page-locked memory, which is twice as fast.
            grad = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad)
        return grad.to(dtype).mul_(factor)

    if bucket.convert_gradient(widened):
        grads = bucket.gradients()
    else:
        grads = [None if grad is None else widened(grad) for grad in bucket.gradients()]
    for partition, grad in zip(bucket.partitions, grads, strict=True):
        if grad is None and partition.is_master:
            # As for fairseq's masters; unused fp32 parameters are skipped.
            grad = torch.zeros_like(partition.own)
        partition.own.grad = grad
    return owned


def _without_fp16_stats(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with fp32 moments, also from a run with --fp16-adam-stats."""
    scales = {key: state[key + "_scale"] for key in state if key + "_scale" in state}
    wide = {key: state[key].float() * scale for key, scale in scales.items()}
    return {
        k: wide.get(k, v) for k, v in state.items() if k.removesuffix("_scale") not in scales or k in wide
    }
