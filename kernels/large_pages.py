"""Large pages for tensors that are written once a step, where the system gives freed memory back.

glibc maps a tensor above 32 MiB anew each time it is made, and the system clears it page by page as it is
written: 4 KiB at a time, where it is not asked for more.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What glibc always maps anew, unless told otherwise (`ft.keep_freed_memory`).
LEAST_BYTES = 2**25
PAGE_BYTES = 2**21
MADV_HUGEPAGE = 14


def in_large_pages(tensor: Tensor) -> Tensor:
    """Return a tensor that is still to be written, its memory in large pages where there are such."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES:
        return tensor
    madvise = _madvise()
    if madvise is not None:
        first = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
        madvise(first, end - first, MADV_HUGEPAGE)  # advice: what it returns changes nothing
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
