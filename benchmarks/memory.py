"""Measures the memory of a process, the saved activations of a step, and the bytes allocated on a GPU."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


class _Kept:
    """Wrapper of a saved tensor, which is freed together with the autograd graph."""

    def __init__(self, tensor: Tensor) -> None:
        # Without detach, an output and its autograd node would refer to each other and never be freed.
        self.tensor = tensor.detach()


def kept_bytes(forward: Callable[[], Tensor], excluded: Iterable[Tensor]) -> int:
    """Return the bytes of saved activations; each storage counts once, `excluded` tensors do not count."""
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
        forward: function that returns the output, with its autograd graph.
        dy: gradient of the output.
        clear: function that removes all gradients.

    Returns:
        saved_bytes: bytes of saved activations and output, between forward and backward.
        peak_bytes: maximum of allocated bytes, including the gradients of the weights.
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


@contextmanager
def own_peak() -> Iterator[list[int]]:
    """Sample this process's memory (RssAnon) every millisecond; item 0 of the list is the maximum."""
    peak, done = [own_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def own_memory() -> int:
    """Return this process's memory in bytes, without pages mapped from files. Needs Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
