"""The tuner: finds the fastest How for each capacity bucket by measuring real steps.

For each key a search of its own: r first, by a unimodal search, since its cost is the sum of a rising term
(rows sent r times) and a falling one (weights gathered); then all pairs (overlap, algorithm) at that r;
then the neighbours of r at the best pair, and r = 0, which sends no rows; last a run-off between those
that are close. It sees nothing but the costs that it is told, so ranks that are told the same choose the
same.

Source: Tutel (Hwang et al. 2023), section 3.3 (the dictionary and its search); the last two are ours.
"""

import dataclasses
import math
from collections.abc import Generator, Iterable, Sequence
from statistics import median
from typing import Any

from fairseq_tutel.comm.how import How

TRIALS = 3  # measurements of a candidate; their median counts
CLOSE = 1.1  # candidates within this factor of the best meet in the run-off
FINALISTS = 5
HOPELESS = 2.0  # times the best so far, at the first measurement
RUN_OFF = 2  # times as many measurements as before

Costs = dict[How, list[float]]
# Yields what to run next, is sent its cost, fills a dictionary of costs; the whole search returns the best.
Search = Generator[How, float, Any]


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
        self.best: dict[str, How] = {}
        self.costs: dict[str, Costs] = {}
        self._searches: dict[str, tuple[Search, How]] = {}
        self._warm: set[How] = set()

    def choose(self, key: str) -> How:
        """Return what to run a step of this key with: the best, or the next candidate."""
        if key in self.best:
            return self.best[key]
        if key not in self._searches:
            search = self._search(self.costs.setdefault(key, {}))
            self._searches[key] = search, next(search)
        return self._searches[key][1]

    def record(self, key: str, how: How, cost: float) -> None:
        """Tell what a step took, in any unit that is the same for all of a key.

        The first step of a candidate that has never run is not counted: it sets up what later ones use.
        """
        if key in self.best or key not in self._searches or not math.isfinite(cost):
            return
        search, asked = self._searches[key]
        if how != asked:
            return
        if how not in self._warm:
            self._warm.add(how)
            return
        try:
            self._searches[key] = search, search.send(cost)
        except StopIteration as end:
            del self._searches[key]
            self.best[key] = end.value

    def settled(self, key: str) -> bool:
        """Whether the search of a key has ended."""
        return key in self.best

    def most_steps(self) -> int:
        """Return a bound on the steps that a key's search takes, the first ones of each included."""
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
                "costs": [{**dataclasses.asdict(how), "costs": c} for how, c in costs.items() if c],
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
                    How(**{k: v for k, v in row.items() if k != "costs"}): list(
                        map(float, row["costs"])
                    )
                    for row in entry["costs"]
                }
                best = None if entry["best"] is None else How(**entry["best"])
                if best is not None and not self._can_choose(best):
                    refused += 1
                    continue
                self.costs[key] = {how: c for how, c in costs.items() if self._can_choose(how)}
                if best is not None:
                    self.best[key] = best
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no state of a tuner: {error!r}") from error
        return refused

    def _can_choose(self, how: How) -> bool:
        return (
            how.adaptive_r in self.rs
            and how.overlap in self.overlaps
            and how.algorithm in self.algorithms
        )

    def _search(self, costs: Costs) -> Search:
        plain = How(adaptive_r=1, overlap=self.overlaps[0], algorithm=self.algorithms[0])
        positive = [r for r in self.rs if r > 0]
        if positive:
            yield from self._find_degree(positive, plain, costs)
            best = _cheapest(costs)
            for overlap in self.overlaps:
                for algorithm in self.algorithms:
                    pair = dataclasses.replace(best, overlap=overlap, algorithm=algorithm)
                    yield from self._measure(pair, costs)
            best = _cheapest(costs)
            at = positive.index(best.adaptive_r)
            for r in positive[max(0, at - 1) : at + 2]:
                yield from self._measure(dataclasses.replace(best, adaptive_r=r), costs)
        if 0 in self.rs:
            yield from self._measure(dataclasses.replace(plain, adaptive_r=0), costs)
        return (yield from self._run_off(costs))

    def _find_degree(self, degrees: Sequence[int], plain: How, costs: Costs) -> Search:
        """Narrow down to the least of a sequence that falls, then rises."""
        low, high = 0, len(degrees) - 1

        def at(i: int) -> How:
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

    def _measure(self, how: How, costs: Costs) -> Search:
        """Measure a candidate; once is enough for one that is much slower than the best so far."""
        others = [median(c) for c in costs.values() if c]
        while len(costs.setdefault(how, [])) < self.trials:
            costs[how].append((yield how))
            if others and costs[how][0] > HOPELESS * min(others):
                return

    def _run_off(self, costs: Costs) -> Search:
        """Return the best of those that are close, measured anew in turns: a drift meets all alike."""
        ranked = sorted(costs, key=lambda how: median(costs[how]))
        limit = CLOSE * median(costs[ranked[0]])
        finalists = [how for how in ranked[:FINALISTS] if median(costs[how]) <= limit]
        if len(finalists) == 1:
            return finalists[0]
        anew: Costs = {how: [] for how in finalists}
        for _ in range(RUN_OFF * self.trials):
            for how in finalists:
                anew[how].append((yield how))
        costs.update(anew)
        return _cheapest(anew)


def _cheapest(costs: Costs) -> How:
    """Return the candidate of the lowest median; of equals the one that was tried first."""
    return min(costs, key=lambda how: median(costs[how]))
