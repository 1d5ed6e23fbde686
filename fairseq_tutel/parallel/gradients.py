"""Reduction, overflow handling, global norm and clipping of gradients across ranks.

After the backward pass, an expert's gradient is the sum over the tokens of its EP group. Gradients of dense
parameters are averaged over the W ranks. Expert gradients are summed over EP replicas and divided by W, and
so get the same scale as dense gradients.

gloo reduces one parameter at a time. Buckets would change results, because the order of gloo's sum depends
on an element's position in the tensor. NCCL and collective plans reduce buckets of several parameters. No
gradient is reduced during the backward pass, for two reasons.

- It is not known in advance which backward pass of an update is the last.
- With NCCL, simultaneous row exchanges would change the order in which gradients are added.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fairseq_tutel.parallel.collectives import Group, Started, all_reduce, is_replaced, start_all_reduce
from fairseq_tutel.parallel.groups import Topology

BUCKET_BYTES = 25 * 2**20


def mark_expert(parameter: nn.Parameter) -> None:
    """Mark a parameter as a parameter of this rank's experts."""
    parameter.expert = True  # type: ignore[attr-defined]  # fairseq's data parallelism skips the parameter
    parameter._tutel_expert = True  # type: ignore[attr-defined]  # Tutel's optimizer skips the parameter


def unmark_expert(parameter: nn.Parameter) -> None:
    """Remove the expert mark of a parameter that all ranks hold, so that fairseq reduces and clips it."""
    if hasattr(parameter, "expert"):
        del parameter.expert


def mark_root_scaled(parameter: nn.Parameter) -> None:
    """Mark an expert parameter, so that its summed gradient is divided by sqrt(world size).

    `--moe-normalize-expert-grad sqrt_world_size` needs this divisor. The default divisor is W.
    """
    parameter.root_scaled = True  # type: ignore[attr-defined]


def gradient_divisor(parameter: Tensor, world_size: int) -> float:
    """Return the divisor of a summed gradient, which is W, or sqrt(W) after `mark_root_scaled`."""
    return world_size**0.5 if getattr(parameter, "root_scaled", False) else world_size


def rescale_expert_gradients(parameters: Iterable[nn.Parameter], world_size: int) -> None:
    """Multiply gradients by sqrt(world size) in place, if `mark_root_scaled` marked the parameter.

    The gradients have already been divided by the world size.
    """
    for parameter in parameters:
        if getattr(parameter, "root_scaled", False) and parameter.grad is not None:
            parameter.grad.mul_(world_size**0.5)


def is_expert(parameter: Tensor) -> bool:
    """Return whether `mark_expert` marked a parameter; an fp32 copy has the mark of its original."""
    return getattr(parameter, "expert", False)


def reduce_expert_gradients(parameters: Iterable[nn.Parameter], topology: Topology) -> None:
    """Sum each expert gradient over EP replicas and divide by the world size, in place. Collective."""
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
    """Divide gradients in place before they are summed over ranks, so that the sums do not overflow."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(divisor)


def _sum(parameters: Iterable[nn.Parameter], operation: str, group: Group) -> None:
    trained = [p for p in parameters if p.requires_grad]
    in_buckets = is_replaced("all_reduce", group) or any(p.is_cuda for p in trained)
    previous: Started | None = None
    for bucket in _buckets(trained, BUCKET_BYTES if in_buckets else 0):
        started = _start_sum(bucket, operation, group)
        # At most two buckets are in memory: one is being concatenated, and one is being reduced.
        if previous is not None:
            previous.wait()
        previous = started
    if previous is not None:
        previous.wait()


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
    """Split parameters into lists (buckets) of one dtype and device; `limit` bytes fill a bucket."""
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        bucket = filling.setdefault(key, [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= limit:
            full.append(filling.pop(key))
    return [*full, *filling.values()]


def global_grad_norm(parameters: Iterable[Tensor], topology: Topology) -> Tensor:
    """Return the L2 norm of all gradients: dense parameters, and the experts of all ranks. Collective.

    Each expert parameter counts once, because the sum over all W ranks is divided by the number of EP
    replicas. Every rank gets bit-identical norms. A NaN or infinity on one rank gives a NaN or infinity on
    all ranks. The norm has the dtype fp32 (fp64 for fp64 gradients).
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
    """Multiply every gradient by min(1, max_norm / norm) in place. max_norm <= 0 disables clipping."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if max_norm <= 0 or not grads:
        return
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale)


def square_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all gradients in fp32 (fp64 for fp64), or 0 without gradients."""
    return _norms(grads, device).square().sum()


def local_grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of this rank's gradients, bit-identical to fairseq's `clip_grad_norm_` on CPU.

    If the machine has a GPU, fairseq moves its norm to the GPU, even under --cpu. The norm of this function
    stays on the gradients' device. The norm has the dtype fp32 (fp64 for fp64 gradients).
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.linalg.vector_norm(_norms(grads, device))


def _norms(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm of each gradient, or a single 0 without gradients."""
    if not grads:
        return torch.zeros(1, device=device, dtype=torch.float32)
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in grads])
