"""Memory of a step: saved activations, and on a GPU allocated bytes."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class _Kept:
    """A saved tensor, which is freed with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        # Without detach, an output and its node would keep each other alive.
        self.tensor = tensor.detach()


def kept_bytes(forward: Callable[[], Tensor], excluded: Iterable[Tensor]) -> int:
    """Return the bytes of saved activations, each storage once, without those of `excluded` tensors."""
    alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        y = forward()
    # Unused tensors are freed by now, so addresses are unique.
    storages = [kept.tensor.untyped_storage() for kept in alive]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in excluded:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del y
    return sum(sizes.values())


def bytes_of_step(forward: Callable[[], Tensor], dy: Tensor, clear: Callable[[], object]) -> dict[str, int]:
    """Run a step on a GPU; return the bytes that it allocates.

    Args:
        forward: returns the output, with its graph.
        dy: gradient of the output.
        clear: drops all gradients.

    Returns:
        saved_bytes: saved activations and output, between forward and backward.
        peak_bytes: the maximum, including the gradients of the weights.
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
