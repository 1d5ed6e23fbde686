"""Keep freed host memory in the process, so that a CPU training does not fault it in again every step.

By default glibc gives a large tensor back to the system when it is freed; the next one of its size is
then mapped and zeroed page by page. The stacked gradients of experts are such tensors.
"""

import ctypes
import sys

import torch

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB, MIB = 2**30, 2**20


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds where there is glibc and no GPU; return whether it was done."""
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: GIB, M_TRIM_THRESHOLD: 2 * GIB - 1, M_TOP_PAD: 64 * MIB}
    done = [mallopt(parameter, value) == 1 for parameter, value in wanted.items()]
    return all(done)
