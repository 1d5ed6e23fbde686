"""Dataclass fields that are computed at their first access; evaluation never reads most of them."""

from collections.abc import Callable
from typing import Any

import torch


def can_defer(training: bool) -> bool:
    """Return whether losses and slots may be computed later: no training, gradients or tracing."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())


class Deferred:
    """A mixin that computes the missing fields of a dataclass at the first access to one of them.

    List it before the dataclass in the bases.

    Args:
        compute: returns an object with the missing fields; None if `known` has all fields.
        known: the other fields, by name.
    """

    def __init__(self, compute: Callable[[], Any] | None = None, **known: Any) -> None:
        self.__dict__.update(known, _compute=compute)

    @property
    def is_deferred(self) -> bool:
        """Whether some fields are computed at their first access; False if all fields were given."""
        return self.__dict__["_compute"] is not None

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:  # type: ignore[attr-defined]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        computed = vars(self.__dict__["_compute"]())
        self.__dict__.update({**computed, **self.__dict__})
        return self.__dict__[name]
