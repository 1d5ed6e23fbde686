"""Requests large memory pages for big tensors that are allocated in every training step on a CPU.

glibc allocates each tensor above 32 MiB with a new mmap. The operating system then clears the pages one by
one on the first write. By default, a page has 4 KiB.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# glibc allocates larger blocks with mmap, unless `ft.keep_freed_memory` has changed the limit.
LEAST_BYTES = 2**25
PAGE_BYTES = 2**21
MADV_HUGEPAGE = 14


def in_large_pages(tensor: Tensor) -> Tensor:
    """Request large pages for a tensor that has not been written yet, and return the tensor."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES:
        return tensor
    madvise = _madvise()
    if madvise is not None:
        first = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
        madvise(first, end - first, MADV_HUGEPAGE)  # the request is only a hint, so errors are ignored
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
