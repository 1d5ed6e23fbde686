"""A swarm: thousands of ranks as threads of one process, which share one store and its one lock.

A job's store is one thread, too, that answers one request after the other.
"""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

STACK_BYTES = 512 * 1024

# What a rank does: from the store and its rank to whether it went well.
Action = Callable[[dist.Store, int], bool]


class CountingStore(dist.HashStore):
    """A store that counts its requests.

    Attributes:
        asked: keys of every call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def check(self, keys: Any) -> bool:
        """Count and ask."""
        self.asked.append(len(keys))
        return super().check(keys)

    def wait(self, keys: Any, *timeout: Any) -> None:
        """Count and ask."""
        self.asked.append(len(keys))
        super().wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        """Count and ask."""
        self.asked.append(1)
        return super().get(key)

    def set(self, key: str, value: Any) -> None:
        """Count and ask."""
        self.asked.append(1)
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Count and ask."""
        self.asked.append(1)
        return super().add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Count and ask."""
        self.asked.append(1)
        return super().delete_key(key)


def run(world: int, action: Action) -> dict[str, float]:
    """Run a function on all ranks at once; return its cost.

    Returns:
        seconds, of the slowest rank; median_seconds; requests to the store and the keys in them; wrong,
        the ranks for which it did not go well.
    """
    threading.stack_size(STACK_BYTES)
    store, go = CountingStore(), threading.Event()
    rows: list[tuple[float, bool]] = []

    def act(rank: int) -> None:
        go.wait()
        start = time.perf_counter()
        try:
            well = action(store, rank)
        except RuntimeError:
            well = False
        rows.append((time.perf_counter() - start, well))

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    seconds, well = zip(*rows, strict=True)
    return {
        "seconds": max(seconds),
        "median_seconds": statistics.median(seconds),
        "requests": len(store.asked),
        "keys": sum(store.asked),
        "wrong": well.count(False),
    }
