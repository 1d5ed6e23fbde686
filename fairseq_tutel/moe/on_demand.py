"""Results that are made when somebody reads them: of an evaluation nobody reads most."""

from collections.abc import Callable
from typing import Any

import torch


class OnDemand:
    """Goes before a dataclass: fields that it is not given are made, all at once, when one of them is read.

    Args:
        make: returns an object with these fields.
        known: fields by name, which stay as they are given; those with a default must be among them.
    """

    def __new__(cls, make: Callable[[], Any] | None = None, **known: Any) -> Any:
        """Return one, or of all its fields, as `dataclasses.replace` gives them, an ordinary object."""
        if make is None and known:
            return cls.__bases__[1](**known)
        return super().__new__(cls)

    def __init__(self, make: Callable[[], Any], **known: Any) -> None:
        self.__dict__.update(known, _make=make)

    def __getattr__(self, name: str) -> Any:
        make = None if name.startswith("__") else self.__dict__.pop("_make", None)
        if make is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        self.__dict__.update({**vars(make()), **self.__dict__})
        return getattr(self, name)


def can_wait(training: bool) -> bool:
    """Whether what a forward gives beside y may be made later: nothing is trained, or traced."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())
