"""Results that are computed at their first access: most results of an evaluation are never read."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch


def can_defer(training: bool) -> bool:
    """Whether a forward may defer its losses and slots: nothing is trained or traced."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())


class Deferred:
    """A mixin before a dataclass, some fields of which are `deferred_field`.

    Args:
        compute: returns an object with these fields; None if `known` has all of them.
        known: the other fields, by name.
    """

    def __init__(self, compute: Callable[[], Any] | None = None, **known: Any) -> None:
        self.__dict__.update(known, _compute=compute)

    @property
    def is_deferred(self) -> bool:
        """Whether the deferred fields follow from the others; False if a caller gave them."""
        return self.__dict__["_compute"] is not None

    @cached_property
    def _computed(self) -> Any:
        return self.__dict__["_compute"]()


def deferred_field(name: str) -> Any:
    """Return a property that reads a field of the computed object; a value in `known` replaces it."""
    return cached_property(lambda self: getattr(self._computed, name))
