"""Finds the fastest strategy for each bucket (range of expert capacities) by measuring training updates.

All updates in a bucket use the same strategy after the search. The cost model proposes the candidates of a
bucket. Candidates are measured in rounds. A round is one update for each candidate. After each round,
candidates that are too slow drop out. The choice depends only on recorded costs. Ranks with equal costs
therefore choose the same strategy. The buckets, but not the search, are from Tutel (Hwang et al. 2023),
section 3.3.
"""

import math
from collections.abc import Callable, Iterable
from itertools import product
from statistics import median_low

from fairseq_tutel.parallel.strategy import Strategy

MOST_CANDIDATES = 12
MOST_PREDICTED = 3.0  # Candidates may take this multiple of the shortest predicted time.
ROUNDS = 7
# After round n, candidates drop out if their cost exceeds the n-th factor times the lowest cost. The last
# factor also applies to all later rounds.
LIMITS = (math.inf, 1.7, 1.3, 1.1)

Costs = dict[Strategy, list[float]]
Predict = Callable[[Strategy], float]


class StrategySearch:
    """Chooses the strategy of the next update by measuring candidates and then keeping the fastest.

    The configured strategy (`given`) stays a candidate even if its predicted time is long.
    """

    def __init__(
        self,
        rs: Iterable[int] = (1,),
        overlaps: Iterable[int] = (1, 2, 4, 8),
        algorithms: Iterable[str] = ("linear", "2dh"),
        given: Strategy | None = None,
    ) -> None:
        self.rs, self.overlaps = tuple(sorted(set(rs))), tuple(overlaps)
        self.algorithms, self.given = tuple(algorithms), given
        self.best: dict[str, Strategy] = {}
        self.costs: dict[str, Costs] = {}
        self.candidates: dict[str, list[Strategy]] = {}
        self._next: dict[str, Strategy] = {}
        self._warm: set[tuple[str, Strategy]] = set()

    def choose(self, key: str, predict: Predict | None = None) -> Strategy:
        """Return the best strategy for the bucket `key`, or the next candidate to measure.

        `predict` returns the predicted seconds of a strategy.
        """
        if key not in self.best and key not in self._next:
            self.candidates[key] = self._pruned(predict)
            self._advance(key)
        return self.best[key] if key in self.best else self._next[key]

    def record(self, key: str, strategy: Strategy, cost: float) -> None:
        """Record the cost of an update with `strategy`. All costs of a bucket `key` need the same unit."""
        if not math.isfinite(cost):
            return
        if strategy == self._next.get(key):
            # The first update with each candidate is not recorded, because it allocates new buffers.
            if (key, strategy) in self._warm:
                self.costs[key].setdefault(strategy, []).append(cost)
                self._advance(key)
            self._warm.add((key, strategy))

    def settled(self, key: str) -> bool:
        """Return whether the search for the best strategy of the bucket `key` has ended."""
        return key in self.best

    def _pruned(self, predict: Predict | None) -> list[Strategy]:
        """Return the strategies to measure, from the lowest to the highest predicted time."""
        every = [
            Strategy(adaptive_r=r, overlap=overlap, algorithm=algorithm)
            for r, overlap, algorithm in product(self.rs, self.overlaps, self.algorithms)
            # With adaptive_r = 0, no rows are sent, so overlap and all-to-all algorithm have no effect.
            if r > 0 or (overlap, algorithm) == (self.overlaps[0], self.algorithms[0])
        ]
        if predict is None:
            return every
        seconds = {strategy: predict(strategy) for strategy in every}
        limit = MOST_PREDICTED * min(seconds.values())
        ranked = sorted(every, key=seconds.__getitem__)[:MOST_CANDIDATES]
        kept = [strategy for strategy in ranked if seconds[strategy] <= limit]
        if self.given in every and self.given not in kept:
            kept.append(self.given)
        return kept

    def _advance(self, key: str) -> None:
        """Choose the next candidate to measure for `key` or, after the last round, the best candidate."""
        costs, active = self.costs.setdefault(key, {}), self.candidates[key]
        for n in range(1, ROUNDS + 1):
            waiting = [strategy for strategy in active if len(costs.get(strategy, ())) < n]
            if waiting:
                self._next[key] = waiting[0]
                return
            # Outliers are slow updates, so the lower median is used for an even number of costs.
            middle = {strategy: median_low(costs[strategy][:n]) for strategy in active}
            limit = LIMITS[min(n, len(LIMITS)) - 1] * min(middle.values())
            active = [strategy for strategy in active if middle[strategy] <= limit]
            if len(active) == 1:
                break
        self._next.pop(key, None)
        self.best[key] = min(active, key=middle.__getitem__)
