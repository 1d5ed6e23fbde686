"""Every static (r, d, algorithm) of a layer with fewer experts than ranks, and the tuner's choice."""

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.cluster.layers import FORMS, make_layer, rows_of, step_of
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, seconds_of, summary
from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.planning.tuner import Tuner

# More than any search over the choices here takes; a tuner that never settles is reported, not awaited.
MOST_STEPS = 500
# The last comparison is of few choices, so it can afford more repeats than that of all: so many times as
# many for two, and more choices share the time of two, but get at least FEWEST_REPEATS.
FINAL_REPEATS, FEWEST_REPEATS = 4, 2
# Static choices that may be as good as the best of the grid, whose few repeats do not tell: they are
# measured again.
CLOSE, MOST_CLOSE = 1.15, 6


def static_choices(settings: Settings) -> list[Strategy]:
    """Return every choice; where no row travels, d and algorithm choose nothing."""
    travelling = [
        Strategy(adaptive_r=r, overlap=d, algorithm=algorithm)
        for r in settings.degrees
        if r > 0
        for d in settings.overlaps
        for algorithm in settings.algorithms
    ]
    return [Strategy(adaptive_r=0), *travelling]


def canonical(strategy: Strategy) -> Strategy:
    """Return the one of `static_choices` that a choice is the same as."""
    return Strategy(adaptive_r=0) if strategy.adaptive_r == 0 else strategy


def tuning(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield, for every form of experts and number of tokens, all static choices, then the tuner's."""
    for form in FORMS:
        layer = make_layer(settings, settings.experts, form)
        tuner = Tuner(
            rs=settings.degrees, overlaps=settings.overlaps, algorithms=settings.algorithms
        )
        for tokens in settings.tokens:
            plain = step_of(layer, rows_of(settings, tokens, dist.get_rank()))
            steps = {
                strategy: _with(layer, strategy, plain) for strategy in static_choices(settings)
            }
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
    tuner: Tuner, key: str, layer: Any, plain: Step, took: dict[Strategy, list[float]], repeats: int
) -> dict[str, Any]:
    """Let the tuner search, then compare its choice with the good static ones, again and in turns."""
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
        # None below 0: the best is the least of what was measured again, the tuner's choice included.
        "regret": fresh[chosen] / fresh[best] - 1,
        # What the same comparison says of a choice and itself, with half of the times.
        "noise": max(halves) / min(halves) - 1,
        # What a user who fixed the worst of each would lose, the rest being as the tuner has it.
        "gain_over_worst_r": _gain(static, chosen, ("overlap", "algorithm")),
        "gain_over_worst_overlap": _gain(static, chosen, ("adaptive_r",)),
        "gain_over_worst": max(static.values()) / static[chosen],
    }


def close_to_best(static: dict[Strategy, float]) -> list[Strategy]:
    """Return the choices whose seconds are within CLOSE of the least, best first, MOST_CLOSE at most."""
    ranked = sorted(static, key=static.__getitem__)
    limit = CLOSE * static[ranked[0]]
    return [strategy for strategy in ranked[:MOST_CLOSE] if static[strategy] <= limit]


def repeats_of(number: int) -> int:
    """Return how many times the repeats of the grid each of so many choices gets in the last comparison."""
    return max(FEWEST_REPEATS, 2 * FINAL_REPEATS // number)


def _gain(static: dict[Strategy, float], chosen: Strategy, fixed: tuple[str, ...]) -> float:
    """Return the time of the worst choice that is `chosen` in the fixed fields, over that of `chosen`.

    r = 0 has neither d nor algorithm, so it is in reach of every choice.
    """
    alike = [
        seconds
        for strategy, seconds in static.items()
        if all(getattr(strategy, name) == getattr(chosen, name) for name in fixed)
        or (strategy.adaptive_r == 0 and "adaptive_r" not in fixed)
    ]
    return max(alike) / static[chosen]
