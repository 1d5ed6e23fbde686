"""The allocator's thresholds for host memory."""

import ctypes
import sys

import torch

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB, MIB = 2**30, 2**20


def keep_freed_memory() -> bool:
    """Keep freed host memory in the process, under glibc without a GPU; return whether it worked.

    By default glibc returns a large tensor's memory to the system when it is freed. The next tensor of that
    size is then mapped and zeroed page by page, in every step. Stacked gradients of experts are so large.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: GIB, M_TRIM_THRESHOLD: 2 * GIB - 1, M_TOP_PAD: 64 * MIB}
    done = [mallopt(parameter, value) == 1 for parameter, value in wanted.items()]
    return all(done)
