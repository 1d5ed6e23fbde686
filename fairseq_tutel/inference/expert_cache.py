"""The cache of experts that no MoE block currently uses, with its eviction policies."""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

Key = tuple[int, int]  # the indices of a stack and an expert


class ExpertCache:
    """A cache of expert keys that is limited in bytes and in experts; a limit of None means no limit.

    The policy determines which expert is evicted first:

    - `lfu`: the least frequently used since the store was opened. Ties go to the least recently used.
    - `lru`: the least recently used.
    - `fifo`: the expert that was fetched first.
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
        """Record that an expert is being fetched, which sets its eviction order under policy `fifo`."""
        if self.policy == "fifo":
            self._ranks[key] = (next(self._time),)

    def note_use(self, key: Key) -> None:
        """Record that a block uses an expert, which sets its eviction order under `lfu` and `lru`."""
        self._uses[key] += 1
        if self.policy != "fifo":
            uses = self._uses[key] if self.policy == "lfu" else 0
            self._ranks[key] = uses, next(self._time)

    def put(self, key: Key, num_bytes: int) -> Iterator[Key]:
        """Add an expert to the cache; yield the evicted experts, which may include the new expert."""
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

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many further experts fit; `sizes` are their bytes, in the order in which they come."""
        left = math.inf if self.most_bytes is None else self.most_bytes - self._bytes
        most = len(sizes) if self.most_experts is None else self.most_experts - len(self._kept)
        for count, size in enumerate(sizes):
            left -= size
            if left < 0 or count >= most:
                return count
        return len(sizes)

    def take(self, key: Key) -> None:
        """Remove an expert from the cache if it is there."""
        self._bytes -= self._kept.pop(key, ((), 0))[1]

    @property
    def _is_full(self) -> bool:
        return (self.most_bytes is not None and self._bytes > self.most_bytes) or (
            self.most_experts is not None and len(self._kept) > self.most_experts
        )
