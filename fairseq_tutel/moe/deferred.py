"""Results that are computed at their first access: most results of an evaluation are never read."""

from collections.abc import Callable
from typing import Any

import torch


def can_defer(training: bool) -> bool:
    """Whether a forward may defer its losses and slots: nothing is trained or traced."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())


class Deferred:
    """A mixin before a dataclass: missing fields are computed together, at the first access to one of them.

    Args:
        compute: returns an object with the missing fields; None if `known` has all fields.
        known: the other fields, by name.
    """

    def __init__(self, compute: Callable[[], Any] | None = None, **known: Any) -> None:
        self.__dict__.update(known, _compute=compute)

    @property
    def is_deferred(self) -> bool:
        """Whether the missing fields follow from the known ones; False if a caller gave all."""
        return self.__dict__["_compute"] is not None

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:  # type: ignore[attr-defined]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        computed = vars(self.__dict__["_compute"]())
        self.__dict__.update({**computed, **self.__dict__})
        return self.__dict__[name]
