"""Gradients across ranks: reduction, overflow, global norm and clipping.

After backward, an expert's gradient is the sum over the tokens of its expert group, while a dense
parameter's is averaged over the W ranks. Summing the replicas and dividing by W gives both the same scale.

torch.distributed reduces one parameter at a time: the order of gloo's sum depends on an element's position
in the tensor. A collective plan reduces buckets. Nothing is reduced during backward: an update's last
backward is not known in advance, and with NCCL, simultaneous row exchanges would change the order of sums.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.comm.collectives import Group, Started, all_reduce, is_replaced, start_all_reduce
from fairseq_tutel.ranks.groups import Topology

BUCKET_BYTES = 25 * 2**20


def mark_expert(parameter: nn.Parameter) -> None:
    """Mark a parameter as this rank's part of the experts."""
    parameter.expert = True  # type: ignore[attr-defined]  # fairseq's data parallel skips it
    parameter._tutel_expert = True  # type: ignore[attr-defined]  # Tutel's optimizer skips it


def mark_root_scaled(parameter: nn.Parameter) -> None:
    """Divide an expert's summed gradient by sqrt(W) instead of W (Meta's sqrt_world_size)."""
    parameter.root_scaled = True  # type: ignore[attr-defined]


def gradient_divisor(parameter: Tensor, world_size: int) -> float:
    """Return the divisor of a parameter's summed gradient: W, or sqrt(W) by `mark_root_scaled`."""
    return world_size**0.5 if getattr(parameter, "root_scaled", False) else world_size


def rescale_expert_gradients(parameters: Iterable[nn.Parameter], world_size: int) -> None:
    """Multiply gradients of `mark_root_scaled` parameters by sqrt(W), in place, after the division by W."""
    for parameter in parameters:
        if getattr(parameter, "root_scaled", False) and parameter.grad is not None:
            parameter.grad.mul_(world_size**0.5)


def is_expert(parameter: Tensor) -> bool:
    """Whether `mark_expert` was called on this parameter or, for an fp32 copy, on the original."""
    return getattr(parameter, "expert", False)


def reduce_expert_gradients(parameters: Iterable[nn.Parameter], topology: Topology) -> None:
    """Sum each expert gradient over its replicas and divide by W, in place. Collective."""
    experts = [parameter for parameter in parameters if is_expert(parameter)]
    divide_gradients(experts, topology.world_size)
    if topology.replica_group is not None:
        _sum(experts, "the all-reduce of expert gradients", topology.replica_group)


def reduce_dense_gradients(parameters: Iterable[nn.Parameter], world_size: int) -> None:
    """Average the gradients of dense parameters over all ranks, in place. Collective."""
    dense = [parameter for parameter in parameters if not is_expert(parameter)]
    divide_gradients(dense, world_size)
    _sum(dense, "the all-reduce of dense gradients", None)


def divide_gradients(parameters: Iterable[nn.Parameter], divisor: float) -> None:
    """Divide gradients in place, before they are summed: scaled fp16 gradients must not overflow."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(divisor)


def _sum(parameters: Iterable[nn.Parameter], operation: str, group: Group) -> None:
    limit = BUCKET_BYTES if is_replaced("all_reduce", group) else 0
    under_way: list[Started] = []
    for bucket in _buckets([p for p in parameters if p.requires_grad], limit):
        under_way.append(_start_sum(bucket, operation, group))
        # Two at a time: one is stacked while the other is reduced.
        if len(under_way) > 1:
            under_way.pop(0).wait()
    for started in under_way:
        started.wait()


def _start_sum(bucket: Sequence[nn.Parameter], operation: str, group: Group) -> Started:
    first = bucket[0]
    assert first.grad is not None
    if len(bucket) == 1 and first.grad.is_contiguous():
        own = first.grad
    else:
        own = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
    started, total = start_all_reduce(own, operation, group)

    def arrived() -> None:
        parts = total.view(-1).split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view(parameter.shape)

    return started if total is first.grad else started.then(arrived)


def _buckets(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group parameters by dtype and device into buckets of at least `limit` bytes."""
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        bucket = filling.setdefault(key, [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= limit:
            full.append(filling.pop(key))
    return [*full, *filling.values()]


def spread_overflow(parameters: Iterable[nn.Parameter]) -> None:
    """Set an expert gradient to infinity on all ranks if any rank has an infinity or NaN. Collective.

    torch's GradScaler skips an update by the gradients of its rank, which has those of its experts alone.
    """
    grads = [p.grad for p in parameters if is_expert(p) and p.grad is not None]
    if not grads:  # a criterion's parameters, for example; the same on all ranks
        return
    finite = torch.stack([g.isfinite().all() for g in grads]).all()
    overflow = (~finite).to(torch.float32)
    all_reduce(overflow, "the all-reduce of the gradients' overflow", op=dist.ReduceOp.MAX)
    first = grads[0][(0,) * grads[0].dim()]
    first.copy_(torch.where(overflow > 0, torch.inf, first))


def global_grad_norm(parameters: Iterable[Tensor], topology: Topology) -> Tensor:
    """Return the L2 norm over dense parameters and the experts of all ranks, each counted once.

    Reduced over all W ranks and divided by the replicas: every rank gets the same bits, and a NaN or
    infinity on one rank gives a NaN or infinity on all. Collective. fp32 (fp64 for fp64 gradients).
    """
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is not None:
            (experts if is_expert(parameter) else dense).append(parameter.grad)
    square = square_norm(experts, device)
    if topology.expert_parallel_size > 1:
        all_reduce(square, "the all-reduce of the gradient norm")
        square = square / topology.num_replicas
    return (square + square_norm(dense, device)).sqrt()


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale every gradient by min(1, max_norm / norm), in place; max_norm <= 0 disables clipping."""
    if max_norm <= 0:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))


def square_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares in fp32 (fp64 for fp64 gradients); 0 on `device` without gradients."""
    if not grads:
        return torch.zeros((), device=device, dtype=torch.float32)
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in grads])
    return norms.square().sum()
