"""Bytes that a step holds: what autograd keeps for backward, and on a GPU what is allocated."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class _Kept:
    """A tensor that autograd keeps; gone when the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        # An output leads to its node, which keeps this: neither would ever be freed.
        self.tensor = tensor.detach()


def kept_bytes(forward: Callable[[], Tensor], beside: Iterable[Tensor]) -> int:
    """Return the bytes of all storages that a forward's output needs for its backward, each once.

    Args:
        forward: returns the output, with its graph.
        beside: what is there anyway and does not count: the input and the parameters.
    """
    alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        y = forward()
    # What led nowhere is freed by now; addresses are unique among what is not.
    storages = [kept.tensor.untyped_storage() for kept in alive]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in beside:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del y
    return sum(sizes.values())


def bytes_of_step(
    forward: Callable[[], Tensor], dy: Tensor, clear: Callable[[], object]
) -> dict[str, int]:
    """Run a step on a GPU; return what it holds beside what was there before, in bytes.

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
