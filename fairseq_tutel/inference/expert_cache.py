"""The cache of offloaded experts that no MoE layer currently uses, with its eviction policies."""

import itertools
from collections import Counter
from collections.abc import Iterator

Key = tuple[int, int]  # A key is (layer index, expert index).


class ExpertCache:
    """A cache of expert keys with limits in bytes and in experts; a limit of None means no limit.

    The policy `lru` evicts the least recently used expert, and `lfu` the least frequently used expert. If
    several experts are equally frequent, `lfu` evicts the least recently used of these experts.
    """

    def __init__(self, policy: str, most_bytes: int | None, most_experts: int | None) -> None:
        self.policy, self.most_bytes, self.most_experts = policy, most_bytes, most_experts
        self._uses: Counter[Key] = Counter()
        self._ranks: dict[Key, tuple[int, int]] = {}
        self._time = itertools.count(1)
        self._kept: dict[Key, int] = {}  # The size of each expert in bytes.
        self._bytes = 0

    def note_use(self, key: Key) -> None:
        """Record that a MoE layer uses an expert, which changes the order of eviction."""
        self._uses[key] += 1
        self._ranks[key] = self._uses[key] if self.policy == "lfu" else 0, next(self._time)

    def put(self, key: Key, num_bytes: int) -> Iterator[Key]:
        """Add an expert to the cache, and yield the evicted experts, which may include the new expert."""
        self._ranks.setdefault(key, (0, 0))
        self._kept[key] = num_bytes
        self._bytes += num_bytes
        while (self.most_bytes is not None and self._bytes > self.most_bytes) or (
            self.most_experts is not None and len(self._kept) > self.most_experts
        ):
            first = min(self._kept, key=self._ranks.__getitem__)
            self.take(first)
            yield first

    def take(self, key: Key) -> None:
        """Remove an expert from the cache if the cache contains it."""
        self._bytes -= self._kept.pop(key, 0)
