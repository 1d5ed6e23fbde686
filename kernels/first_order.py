"""Makes a double backward through a custom backward raise an error instead of giving wrong results."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = Tensor | None | tuple[Tensor | None, ...]


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate the backward of an autograd function, so that a double backward raises an error.

    torch's `once_differentiable` raises only if an incoming gradient requires a gradient. But the tensors
    saved for backward also depend on the inputs. A second derivative through saved tensors would be wrong.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():  # Autograd builds no graph of this backward pass.
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
    """A wrapper of an autograd context that reads saved tensors once, which checkpointing requires."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Refused(torch.autograd.Function):
    """Returns `number` tensors as if they depended on all given tensors. Its backward raises an error."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "a gradient of a MoE layer was differentiated, but a MoE layer supports only first "
            "derivatives; compute the gradient without create_graph=True, or remove the layer."
        )
