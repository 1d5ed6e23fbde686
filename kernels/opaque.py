"""Hides kernel launches from torch.compile and fake tensors, behind custom torch operators.

torch.compile cannot trace a launch, but can trace an operator that has a fake implementation. The fake
implementation returns empty tensors of the right shapes and dtypes.
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


def opaque(
    fake: Callable[..., Any], finish: Callable[[Any], Any] = lambda found: found
) -> Callable[[Launch], Launch]:
    """Register a function that launches kernels as the torch operator `fairseq_tutel::<its name>`.

    Eager calls bypass the operator, because the dispatch of an operator takes longer than a small launch.

    Args:
        fake: a function with the same arguments, the first of which is a tensor; it returns empty tensors
            of the right shapes, or None for results that are not needed.
        finish: a function that is applied to the operator's results, but not to those of an eager call.
    """

    def decorate(launch: Launch) -> Launch:
        def completed(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(launch)
            def call(*arguments: Any) -> Any:
                found = finish(function(*arguments))
                if not isinstance(found, tuple):
                    return found
                # An operator cannot return None.
                return tuple(found[0].new_empty(0) if t is None else t for t in found)

            return call

        name = f"fairseq_tutel::{launch.__name__}"
        operator = torch.library.custom_op(name, completed(launch), mutates_args=())
        operator.register_fake(completed(fake))

        @functools.wraps(launch)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or isinstance(arguments[0], FakeTensor):
                return operator(*arguments)
            return launch(*arguments)

        return call  # type: ignore[return-value]

    return decorate


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function, and all functions that it calls, from tracing by torch.compile.

    The control flow of such functions depends on values that change in every micro-batch.
    torch.compiler.disable imports the compiler, which takes time. The wrapper therefore calls `disable`
    only if the compiler is already imported.
    """

    @functools.cache
    def found(has_dynamo: bool) -> Callable[P, R]:
        return torch.compiler.disable(function) if has_dynamo else function

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return found("torch._dynamo" in sys.modules)(*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper
