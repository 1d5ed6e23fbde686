"""ZeRO's state: an optimizer's view of a model whose parameters are partitioned, or offloaded.

The optimizer holds what this rank owns of each parameter, in fp32, and knows nothing of ranks. In an
update: backwards, each followed by `finish_backward`; `reduce`; `norm` and `multiply` to clip; `step`;
`zero_grad`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.comm.collectives import Started
from fairseq_tutel.comm.gradients import global_grad_norm
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.partition import Bucket, own_elements, partitions_of
from fairseq_tutel.zero.reduce import (
    GradientReducer,
    gather_weights,
    partitioned_grad_norm,
    whole_of,
)

# Beside the moments in a checkpoint's optimizer state: the fp32 copy of a half-precision weight.
MASTER = "fp32_master"


class ZeroState:
    """The partitions of a model's parameters and all that happens to them.

    Args:
        parameters: of the model, in the same order on all ranks.
        topology: where this rank is.
        stage: 0: whole on every rank, gradients are reduced by somebody else; 1: cut, gradients reduced
            after the last backward; 2: reduced during every backward.
        offload: keep what is owned, and with it the optimizer's moments, in host memory.
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

    @property
    def are_apart(self) -> bool:
        """Whether some state is on other ranks."""
        return any(bucket.share.size > 1 for bucket in self.buckets)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for bucket in self.buckets:
            bucket.free_gradients()
        self.reducer.reset()
        self.factor = 1.0

    def finish_backward(self) -> None:
        """After each backward. Collective under stage 2."""
        self.reducer.finish_backward()

    def reduce(self) -> None:
        """After the last backward of an update, under stage 1 and 2; again it does nothing. Collective."""
        self.reducer.reduce()

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients, when they are widened to fp32: scaled half ones must not vanish."""
        self.factor = self.factor * factor

    def norm(self) -> Tensor:
        """Return the one L2 norm of all gradients, the same bits on all ranks. Collective."""
        if self.stage == 0:
            parameters = [partition.parameter for partition in self.partitions]
            return global_grad_norm(parameters, self.topology) * self.factor
        return partitioned_grad_norm(self.buckets, self.topology) * self.factor

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm` where that is above 0; return the norm."""
        norm = self.norm()
        if max_norm > 0:
            self.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
        """Update all that is owned, bucket by bucket, and give the weights to all ranks. Collective.

        Only one bucket's gradients are fp32 at a time, and its weights travel while the next is updated.

        Args:
            optimizer: of `parameters`; elementwise.
            update: calls its `step`, which sees those of one bucket alone.
        """
        groups = optimizer.param_groups
        # What an optimizer counts there (a step, the last rate) counts updates, not buckets.
        before = [dict(group) for group in groups]
        members = [{id(own) for own in values["params"]} for values in before]
        on_the_way: Started | None = None
        try:
            for bucket in self.buckets:
                owned = _widen_gradients(bucket, self.factor)
                for group, values, ids in zip(groups, before, members, strict=True):
                    group.clear()
                    group.update(values, params=[own for own in owned if id(own) in ids])
                update()
                bucket.free_gradients()
                former, on_the_way = on_the_way, gather_weights(bucket)
                if former is not None:
                    former.wait()
            if on_the_way is not None:
                on_the_way.wait()
        finally:
            for group, values in zip(groups, before, strict=True):
                group["params"] = values["params"]

    def whole_state(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of what is owned as one of its parameter, with its fp32 master if it has one.

        Collective over the ranks that share the parameter, where these are several.

        Args:
            index: of the parameter.
            state: in the optimizer.
        """
        partition, whole = self.partitions[index], dict(state)
        if partition.is_master:
            whole[MASTER] = partition.own.data
        for key in sorted(whole):
            if torch.is_tensor(whole[key]) and whole[key].shape == partition.own.shape:
                whole[key] = whole_of(whole[key], partition)
        return whole

    @torch.no_grad()
    def own_state(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's state, which may come from any other run.

        Raises:
            ValueError: a tensor is a part already.
        """
        partition, own = self.partitions[index], _without_fp16_stats(state)
        shape = partition.parameter.shape
        for key, value in own.items():
            # A count of steps may be a tensor, and so may a parameter without dimensions.
            if not torch.is_tensor(value) or key == "step" or (value.dim() == 0 and len(shape) > 0):
                continue
            if value.shape != shape:
                raise ValueError(
                    f"the checkpoint's {key} of parameter {index} has shape {tuple(value.shape)} but this "
                    f"model needs {tuple(shape)}; give a file that all ranks wrote together, not a crash "
                    "file."
                )
            if key == MASTER and not partition.is_master:
                # Of a half run: this one's weights go on from there on all ranks, which have read it too.
                partition.parameter.copy_(value)
            own[key] = own_elements(value.contiguous(), partition.share).clone()
        return own


def _widen_gradients(bucket: Bucket, factor: float | Tensor) -> list[nn.Parameter]:
    """Give what is owned of a bucket its gradients, in its own dtype and memory, times a factor."""
    owned = [partition.own for partition in bucket.partitions]
    device, dtype = owned[0].device, owned[0].dtype
    if isinstance(factor, Tensor):
        factor = factor.to(device)

    def widened(grad: Tensor) -> Tensor:
        if grad.is_cuda and device.type == "cpu":
            # In the narrow dtype; page-locked memory is twice as fast to copy to.
            grad = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad)
        return grad.to(dtype).mul_(factor)

    if bucket.gradient is not None:
        bucket.gradient = widened(bucket.gradient)
        grads = bucket.gradients()
    else:
        grads = [None if grad is None else widened(grad) for grad in bucket.gradients()]
    for partition, grad in zip(bucket.partitions, grads, strict=True):
        if grad is None and partition.is_master:
            # As fairseq's own masters have it; fp32 parameters that were not used are passed over.
            grad = torch.zeros_like(partition.own)
        partition.own.grad = grad
    return owned


def _without_fp16_stats(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose moments are wide, also where a run with --fp16-adam-stats wrote it."""
    scales = {key: state[key + "_scale"] for key in state if key + "_scale" in state}
    wide = {key: state[key].float() * scale for key, scale in scales.items()}
    return {
        k: wide.get(k, v)
        for k, v in state.items()
        if k.removesuffix("_scale") not in scales or k in wide
    }
