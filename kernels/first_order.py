"""Makes hand-written backward functions raise on double backward instead of returning wrong results."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = Tensor | None | tuple[Tensor | None, ...]


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Wrap the backward of an autograd function so that differentiating its results raises.

    torch's `once_differentiable` raises only if an incoming gradient requires a gradient. The saved tensors
    depend on the inputs too, so the second derivative through them would be silently wrong.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():  # no graph of this backward is built
            return backward(ctx, *incoming)
        read = _Read(ctx)
        with torch.no_grad():
            found = backward(read, *incoming)
        several = found if isinstance(found, tuple) else (found,)
        used = [t for t in (*incoming, *read.saved_tensors) if t is not None and t.requires_grad]
        grads = [t for t in several if t is not None]
        made = iter(_Refused.apply(len(grads), *grads, *used) if grads else ())
        several = tuple(None if t is None else next(made) for t in several)
        return several if isinstance(found, tuple) else several[0]

    return wrapper


class _Read:
    """A context that reads its saved tensors only once, as activation checkpointing requires."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Refused(torch.autograd.Function):
    """The identity on the first `number` tensors; the others are the tensors that they depend on.

    Its backward raises.
    """

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "a MoE layer supports first derivatives only, but a gradient through one was "
            "differentiated; compute it without create_graph=True, or leave out the layer."
        )
