"""The cache of experts that no block currently uses, and its eviction policies."""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator

Key = tuple[int, int]  # of a stack and an expert


class ExpertCache:
    """The keys of cached experts, with limits in bytes and in experts; None for no limit.

    Evicted first: with `lfu` the least frequently used since the store was opened, of several the least
    recently used; with `lru` the least recently used; with `fifo` the one that was fetched first.
    """

    def __init__(self, policy: str, most_bytes: int | None, most_experts: int | None) -> None:
        self.policy, self.most_bytes, self.most_experts = policy, most_bytes, most_experts
        self._uses: Counter[Key] = Counter()
        self._ranks: dict[Key, tuple[int, ...]] = {}  # the smallest is evicted first
        self._time = itertools.count(1)
        self._kept: dict[Key, tuple[tuple[int, ...], int]] = {}  # rank and bytes
        self._order: list[tuple[tuple[int, ...], Key]] = []
        self._bytes = 0

    def note_fetch(self, key: Key) -> None:
        """Record that an expert is fetched."""
        if self.policy == "fifo":
            self._ranks[key] = (next(self._time),)

    def note_use(self, key: Key) -> None:
        """Record that a block computes with an expert."""
        self._uses[key] += 1
        if self.policy != "fifo":
            uses = self._uses[key] if self.policy == "lfu" else 0
            self._ranks[key] = uses, next(self._time)

    def put(self, key: Key, num_bytes: int) -> Iterator[Key]:
        """Add an expert; yield the evicted ones, which may include it."""
        rank = self._ranks.get(key, (0, 0))
        self._kept[key] = rank, num_bytes
        self._bytes += num_bytes
        heapq.heappush(self._order, (rank, key))
        while self._is_full:
            rank, first = heapq.heappop(self._order)
            if self._kept.get(first, (None,))[0] == rank:  # otherwise it was removed since
                self.take(first)
                yield first
        if len(self._order) > 2 * len(self._kept) + 64:
            self._order = [(rank, key) for key, (rank, _) in self._kept.items()]
            heapq.heapify(self._order)

    def take(self, key: Key) -> None:
        """Remove an expert, if it is cached."""
        self._bytes -= self._kept.pop(key, ((), 0))[1]

    @property
    def _is_full(self) -> bool:
        return (self.most_bytes is not None and self._bytes > self.most_bytes) or (
            self.most_experts is not None and len(self._kept) > self.most_experts
        )
