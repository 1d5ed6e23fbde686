"""Bytes that a step holds on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor


def bytes_of_step(
    forward: Callable[[], Tensor], dy: Tensor, clear: Callable[[], object]
) -> dict[str, int]:
    """Run a step; return what it holds beside what was there before, in bytes.

    Args:
        forward: returns the output, with its graph.
        dy: gradient of the output.
        clear: drops all gradients.

    Returns:
        saved_bytes: between forward and backward: what the backward needs, and the output.
        peak_bytes: the most at any moment; the gradients of the weights count.
    """
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = forward()
    saved = torch.cuda.memory_allocated() - before
    y.backward(dy)
    del y
    peak = torch.cuda.max_memory_allocated() - before
    clear()
    return {"saved_bytes": saved, "peak_bytes": peak}
