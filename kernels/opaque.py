"""Kernels that torch.compile and fake tensors see from outside only.

A launch cannot be traced; an operator with a fake implementation, which gives shapes and dtypes alone, can.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

Launch = TypeVar("Launch", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def opaque(fake: Callable[..., Any]) -> Callable[[Launch], Launch]:
    """Register a launching function as operator `fairseq_tutel::<its name>`.

    Eager calls skip the operator, whose dispatch costs more than a small launch does.

    Args:
        fake: takes the same arguments and returns empty tensors of the right shapes.
    """

    def decorate(launch: Launch) -> Launch:
        operator = torch.library.custom_op(
            f"fairseq_tutel::{launch.__name__}", launch, mutates_args=()
        )
        operator.register_fake(fake)

        @functools.wraps(launch)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling() or any(isinstance(a, FakeTensor) for a in arguments):
                return operator(*arguments)
            return launch(*arguments)

        return call  # type: ignore[return-value]

    return decorate


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which torch.compile leaves alone with all that it calls.

    For what goes by numbers that are other ones in every micro-batch. torch.compiler.disable alone would
    import the compiler.
    """

    @functools.cache
    def found(has_dynamo: bool) -> Callable[P, R]:
        return torch.compiler.disable(function) if has_dynamo else function

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return found("torch._dynamo" in sys.modules)(*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper
