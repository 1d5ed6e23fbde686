"""All static (r, d, algorithm) of a layer with fewer experts than ranks, and the tuner's choice."""

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.cluster.layers import FORMS, make_layer, rows_of, step_of
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, seconds_of, summary
from fairseq_tutel.parallel.search import StrategySearch
from fairseq_tutel.parallel.strategy import Strategy

# More than the steps of any search here. A tuner that never settles is reported.
MOST_STEPS = 500
# The last comparison has few choices, so it has more repeats: FINAL_REPEATS times as many for two choices,
# fewer for more choices, and at least FEWEST_REPEATS.
FINAL_REPEATS, FEWEST_REPEATS = 4, 2
# Static choices within this factor of the best, at most so many, are measured again.
CLOSE, MOST_CLOSE = 1.15, 6


def static_choices(settings: Settings) -> list[Strategy]:
    """Return all choices; with r = 0, d and algorithm have no effect."""
    travelling = [
        Strategy(adaptive_r=r, overlap=d, algorithm=algorithm)
        for r in settings.degrees
        if r > 0
        for d in settings.overlaps
        for algorithm in settings.algorithms
    ]
    return [Strategy(adaptive_r=0), *travelling]


def canonical(strategy: Strategy) -> Strategy:
    """Return the equivalent choice in `static_choices`."""
    return Strategy(adaptive_r=0) if strategy.adaptive_r == 0 else strategy


def tuning(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield all static choices and then the tuner's, for each form of experts and number of tokens."""
    for form in FORMS:
        layer = make_layer(settings, settings.experts, form)
        tuner = StrategySearch(
            rs=settings.degrees, overlaps=settings.overlaps, algorithms=settings.algorithms
        )
        for tokens in settings.tokens:
            plain = step_of(layer, rows_of(settings, tokens, dist.get_rank()))
            steps = {strategy: _with(layer, strategy, plain) for strategy in static_choices(settings)}
            took = interleaved(steps, settings.repeats)
            cell = {"form": form, "tokens": tokens}
            for strategy, times in took.items():
                yield {"section": "static", **cell, **asdict(strategy), **summary(times)}
            result = _tuned(tuner, f"{tokens} tokens", layer, plain, took, settings.repeats)
            yield {"section": "tuner", **cell, **result}


def _with(layer: Any, strategy: Strategy, plain: Step) -> Step:
    def step() -> None:
        layer.follow(strategy)
        plain()

    return step


def _tuned(
    tuner: StrategySearch,
    key: str,
    layer: Any,
    plain: Step,
    took: dict[Strategy, list[float]],
    repeats: int,
) -> dict[str, Any]:
    """Run the tuner's search, then compare its choice with the best static ones in turns."""
    num_steps = 0
    while not tuner.settled(key) and num_steps < MOST_STEPS:
        strategy = tuner.choose(key)
        tuner.record(key, strategy, 1000 * seconds_of(_with(layer, strategy, plain)))
        num_steps += 1
    chosen = canonical(tuner.choose(key))
    static = {strategy: median(times) for strategy, times in took.items()}
    finalists = dict.fromkeys((chosen, *close_to_best(static)))
    again = {strategy: _with(layer, strategy, plain) for strategy in finalists}
    times = interleaved(again, repeats_of(len(again)) * repeats)
    fresh = {strategy: median(taken) for strategy, taken in times.items()}
    best = min(fresh, key=fresh.__getitem__)
    halves = [median(times[best][start::2]) for start in (0, 1)]
    return {
        **asdict(chosen),
        "settled": tuner.settled(key),
        "steps": num_steps,
        "seconds": fresh[chosen],
        "best": asdict(best),
        "best_seconds": fresh[best],
        "measured_again": len(fresh),
        # Not below 0, since the best may be the tuner's choice.
        "regret": fresh[chosen] / fresh[best] - 1,
        # The same comparison of a choice with itself, with half of the times each.
        "noise": max(halves) / min(halves) - 1,
        # The loss by the worst value of each choice, with the tuner's other choices.
        "gain_over_worst_r": _gain(static, chosen, ("overlap", "algorithm")),
        "gain_over_worst_overlap": _gain(static, chosen, ("adaptive_r",)),
        "gain_over_worst": max(static.values()) / static[chosen],
    }


def close_to_best(static: dict[Strategy, float]) -> list[Strategy]:
    """Return at most MOST_CLOSE choices whose seconds are within CLOSE of the least, best first."""
    ranked = sorted(static, key=static.__getitem__)
    limit = CLOSE * static[ranked[0]]
    return [strategy for strategy in ranked[:MOST_CLOSE] if static[strategy] <= limit]


def repeats_of(number: int) -> int:
    """Return the factor of repeats in the last comparison of `number` choices."""
    return max(FEWEST_REPEATS, 2 * FINAL_REPEATS // number)


def _gain(static: dict[Strategy, float], chosen: Strategy, fixed: tuple[str, ...]) -> float:
    """Return the time of the worst choice with the same fixed fields, over that of `chosen`.

    r = 0 has any d and algorithm.
    """
    alike = [
        seconds
        for strategy, seconds in static.items()
        if all(getattr(strategy, name) == getattr(chosen, name) for name in fixed)
        or (strategy.adaptive_r == 0 and "adaptive_r" not in fixed)
    ]
    return max(alike) / static[chosen]
