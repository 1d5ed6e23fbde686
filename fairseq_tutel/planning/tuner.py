"""The tuner: finds the fastest strategy for each capacity bucket by measuring real steps.

For each key a search of its own: r first, by a unimodal search, since its cost is the sum of a rising term
(rows sent r times) and a falling one (weights gathered); then all pairs (overlap, algorithm) at that r;
then the neighbours of r at the best pair, and r = 0, which sends no rows; last a run-off between those
that are close. A search that is told a start, such as the best of a bucket beside, goes from there to
better neighbours instead. A best whose cost drifts away is searched again, from itself. The tuner sees
nothing but the costs that it is told, so ranks that are told the same choose the same.

Source: Tutel (Hwang et al. 2023), section 3.3 (the dictionary and its search); r = 0, the run-off, starts
and drifts are ours.
"""

import dataclasses
import math
from collections.abc import Generator, Iterable, Sequence
from statistics import median
from typing import Any

from fairseq_tutel.planning.strategy import Strategy

TRIALS = 3  # measurements of a candidate; their median counts
CLOSE = 1.1  # candidates within this factor of the best meet in the run-off
FINALISTS = 5
HOPELESS = 2.0  # times the best so far, in each of SURE measurements
SURE = 2
RUN_OFF = 2  # times as many measurements as before
WATCHED = 5  # costs of a settled best, whose median tells a drift
DRIFTED = 1.2  # times the cost that it was settled at, or by that much less

Costs = dict[Strategy, list[float]]
# Yields what to run next, is sent its cost, fills a dictionary of costs; the whole search returns the best.
Search = Generator[Strategy, float, Any]


class Tuner:
    """What to run next for a key, and what is best.

    Args:
        rs: degrees of adaptive parallelism to choose from.
        overlaps: numbers of chunks.
        algorithms: of the all-to-all.
        trials: measurements of a candidate.
    """

    def __init__(
        self,
        rs: Iterable[int] = (1,),
        overlaps: Iterable[int] = (1, 2, 4, 8),
        algorithms: Iterable[str] = ("linear", "2dh"),
        trials: int = TRIALS,
    ) -> None:
        self.rs, self.overlaps = tuple(sorted(set(rs))), tuple(overlaps)
        self.algorithms, self.trials = tuple(algorithms), trials
        self.best: dict[str, Strategy] = {}
        self.costs: dict[str, Costs] = {}
        self._searches: dict[str, tuple[Search, Strategy]] = {}
        self._warm: set[tuple[str, Strategy]] = set()
        self._recent: dict[str, list[float]] = {}

    def choose(self, key: str, start: Strategy | None = None) -> Strategy:
        """Return what to run a step of this key with: the best, or the next candidate.

        Args:
            key: of the step.
            start: where a search that begins now begins, such as the best of a key beside.
        """
        if key not in self.best and key not in self._searches:
            known = start is not None and self._can_choose(start)
            costs = self.costs.setdefault(key, {})
            self._go_on(key, self._search(costs, start if known else None))
        return self.best[key] if key in self.best else self._searches[key][1]

    def record(self, key: str, strategy: Strategy, cost: float) -> None:
        """Tell what a step took, in any unit that is the same for all of a key.

        The first step of a candidate in a key is not counted: it sets up what later ones use, for sizes
        that may be new.
        """
        if not math.isfinite(cost):
            return
        if key in self.best:
            self._watch(key, strategy, cost)
        elif key in self._searches and strategy == self._searches[key][1]:
            if (key, strategy) not in self._warm:
                self._warm.add((key, strategy))
            else:
                self._go_on(key, self._searches[key][0], cost)

    def settled(self, key: str) -> bool:
        """Whether the search of a key has ended."""
        return key in self.best

    def most_steps(self) -> int:
        """Return a bound on the steps of a key's search from nothing, the first ones of each included."""
        positive = [r for r in self.rs if r > 0]
        candidates = (
            len(self.rs) + len(self.overlaps) * len(self.algorithms) + min(2, len(positive))
        )
        return candidates * (self.trials + 1) + FINALISTS * RUN_OFF * self.trials

    def state(self) -> dict[str, Any]:
        """Return what `load` takes: of every key the best, if it is known, and all costs; JSON."""
        return {
            key: {
                "best": dataclasses.asdict(self.best[key]) if key in self.best else None,
                "costs": [
                    {**dataclasses.asdict(strategy), "costs": c}
                    for strategy, c in costs.items()
                    if c
                ],
            }
            for key, costs in self.costs.items()
        }

    def load(self, state: dict[str, Any]) -> int:
        """Take over what was found and measured; return the keys whose best cannot be chosen here.

        A search that had not ended goes on, without measuring again what it had measured.

        Raises:
            ValueError: it is no such state.
        """
        refused = 0
        try:
            for key, entry in state.items():
                costs = {
                    Strategy(**{k: v for k, v in row.items() if k != "costs"}): list(
                        map(float, row["costs"])
                    )
                    for row in entry["costs"]
                }
                best = None if entry["best"] is None else Strategy(**entry["best"])
                if best is not None and not self._can_choose(best):
                    refused += 1
                    continue
                self.costs[key] = {
                    strategy: c for strategy, c in costs.items() if self._can_choose(strategy)
                }
                if best is not None:
                    self.best[key] = best
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no state of a tuner: {error!r}") from error
        return refused

    def _can_choose(self, strategy: Strategy) -> bool:
        return (
            strategy.adaptive_r in self.rs
            and strategy.overlap in self.overlaps
            and strategy.algorithm in self.algorithms
        )

    def _go_on(self, key: str, search: Search, cost: float | None = None) -> None:
        """Send a search the cost that it waits for, None to one that begins; keep what it says."""
        try:
            asked = next(search) if cost is None else search.send(cost)
            self._searches[key] = search, asked
        except StopIteration as end:
            self._searches.pop(key, None)
            self.best[key] = end.value

    def _watch(self, key: str, strategy: Strategy, cost: float) -> None:
        """Search a key again from its best when that costs no longer what it did."""
        best, recent = self.best[key], self._recent.setdefault(key, [])
        if strategy != best:
            return
        recent.append(cost)
        if len(recent) < WATCHED:
            return
        del self._recent[key]
        ratio = median(recent) / median(self.costs[key].setdefault(best, recent))
        if not 1 / DRIFTED <= ratio <= DRIFTED:
            del self.best[key]
            self.costs[key] = {}
            self.choose(key, best)

    @property
    def _plain(self) -> Strategy:
        return Strategy(adaptive_r=1, overlap=self.overlaps[0], algorithm=self.algorithms[0])

    def _search(self, costs: Costs, start: Strategy | None) -> Search:
        plain, positive = self._plain, [r for r in self.rs if r > 0]
        if start is not None:
            yield from self._climb(start, costs)
        elif positive:
            yield from self._find_degree(positive, plain, costs)
            best = _cheapest_sender(costs)
            for overlap in self.overlaps:
                for algorithm in self.algorithms:
                    pair = dataclasses.replace(best, overlap=overlap, algorithm=algorithm)
                    yield from self._measure(pair, costs)
            best = _cheapest_sender(costs)
            at = positive.index(best.adaptive_r)
            for r in positive[max(0, at - 1) : at + 2]:
                yield from self._measure(dataclasses.replace(best, adaptive_r=r), costs)
        if 0 in self.rs:
            yield from self._measure(dataclasses.replace(plain, adaptive_r=0), costs)
        return (yield from self._run_off(costs))

    def _climb(self, at: Strategy, costs: Costs) -> Search:
        """Go from a candidate to the best of its neighbours until none is better."""
        while True:
            for strategy in (at, *self._neighbours(at)):
                yield from self._measure(strategy, costs)
            best = _cheapest(costs)
            if best == at:
                return
            at = best

    def _neighbours(self, strategy: Strategy) -> list[Strategy]:
        """Return the candidates that differ by a step in one choice; of r = 0, which has no other, in r."""
        positive = [r for r in self.rs if r > 0]
        if strategy.adaptive_r == 0:
            return [dataclasses.replace(self._plain, adaptive_r=r) for r in positive[:1]]
        choices: dict[str, Sequence[Any]] = {
            "adaptive_r": positive, "overlap": self.overlaps, "algorithm": self.algorithms
        }  # fmt: skip
        found = []
        for name, values in choices.items():
            at = values.index(getattr(strategy, name))
            beside = [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]
            found += [dataclasses.replace(strategy, **{name: value}) for value in beside]
        return found

    def _find_degree(self, degrees: Sequence[int], plain: Strategy, costs: Costs) -> Search:
        """Narrow down to the least of a sequence that falls, then rises."""
        low, high = 0, len(degrees) - 1

        def at(i: int) -> Strategy:
            return dataclasses.replace(plain, adaptive_r=degrees[i])

        while high - low > 2:
            third = (high - low) // 3
            left, right = low + third, high - third
            yield from self._measure(at(left), costs)
            yield from self._measure(at(right), costs)
            if median(costs[at(left)]) <= median(costs[at(right)]):
                high = right - 1
            else:
                low = left + 1
        for i in range(low, high + 1):
            yield from self._measure(at(i), costs)

    def _measure(self, strategy: Strategy, costs: Costs) -> Search:
        """Measure a candidate; fewer times one that is surely much slower than the best so far."""
        own = costs.setdefault(strategy, [])
        others = [median(c) for other, c in costs.items() if c and other != strategy]
        while len(own) < self.trials:
            if others and len(own) >= SURE and min(own) > HOPELESS * min(others):
                return
            own.append((yield strategy))

    def _run_off(self, costs: Costs) -> Search:
        """Return the best of those that are close, measured anew in turns: a drift meets all alike."""
        ranked = sorted(costs, key=lambda strategy: median(costs[strategy]))
        limit = CLOSE * median(costs[ranked[0]])
        finalists = [
            strategy for strategy in ranked[:FINALISTS] if median(costs[strategy]) <= limit
        ]
        if len(finalists) == 1:
            return finalists[0]
        anew: Costs = {strategy: [] for strategy in finalists}
        for _ in range(RUN_OFF * self.trials):
            for strategy in finalists:
                anew[strategy].append((yield strategy))
        costs.update(anew)
        return _cheapest(anew)


def _cheapest_sender(costs: Costs) -> Strategy:
    """Return the cheapest that sends rows; r = 0 may have been measured before a search goes on."""
    return _cheapest({strategy: c for strategy, c in costs.items() if strategy.adaptive_r > 0})


def _cheapest(costs: Costs) -> Strategy:
    """Return the candidate of the lowest median; of equals the one that was tried first."""
    return min(costs, key=lambda strategy: median(costs[strategy]))
