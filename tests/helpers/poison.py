"""Fill what the package allocates without a value: NaN, or an index far out of range.

A kernel that leaves a hole then fails its test instead of reading whatever lay in memory.
"""

import functools
import sys

import torch


def poison_empty() -> None:
    """Wrap torch.empty, torch.empty_like and Tensor.new_empty for callers inside the package."""
    with torch.device("meta"):
        torch.empty(0)  # torch.device() lists the functions to redirect at first use: the true ones
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate):
    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("fairseq_tutel") and not tensor.is_meta:
            floating = tensor.is_floating_point()
            tensor.fill_(float("nan") if floating else torch.iinfo(tensor.dtype).min)
        return tensor

    return wrapper
