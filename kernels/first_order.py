"""First derivatives alone: a backward written by hand says so, instead of giving wrong second ones."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = Tensor | None | tuple[Tensor | None, ...]


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make what the backward of an autograd function returns refuse to be differentiated.

    torch's `once_differentiable` refuses only where an incoming gradient requires one, and on no path to an
    input; but what was saved depends on inputs too, and their second derivative would be wrong without a
    word.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():  # nobody asked for a graph of this backward
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
    """A context whose saved tensors are read once, all that activation checkpointing allows."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Refused(torch.autograd.Function):
    """The identity on the first tensors; the others are what they were made of."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "a MoE layer has first derivatives alone, but a gradient that went through one was "
            "differentiated; take it without create_graph=True, or leave the layer out of it."
        )
