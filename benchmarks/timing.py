"""Measures the times of several steps, which run alternately in one process, with the device's clock.

Each step's time is divided by the baseline's time in the same round, in which the machine is equally slow.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import torch

Step = Callable[[], object]
# Ends the timing of a step; returns a function that returns its seconds after all rounds.
Clock = Callable[[Step], Callable[[], float]]


def interleaved(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    warm: int = 1,
    before: Step = lambda: None,
) -> dict[str, list[float]]:
    """Run every step `warm` rounds unmeasured and then `rounds` rounds, each round in another order.

    Args:
        steps: the steps by name.
        rounds: number of rounds, at least 1.
        device: the device whose clock is used.
        warm: number of warm-up rounds.
        before: a function that runs before every step, without being timed.

    Returns:
        `rounds` times of each step, in seconds, round by round.
    """
    clock = CLOCKS[device.type]
    names = list(steps)
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for number in range(warm + rounds):
        first = number % max(len(names), 1)
        order = names[first:] + names[:first]
        # Every second round is reversed, so that a step does not always run after the same other step.
        for name in order[:: -1 if number % 2 else 1]:
            before()
            reading = clock(steps[name])
            if number >= warm:
                readings[name].append(reading)
    return {name: [read() for read in each] for name, each in readings.items()}


def _by_wall_clock(step: Step) -> Callable[[], float]:
    begin = time.perf_counter()
    step()
    took = time.perf_counter() - begin
    return lambda: took


def _by_cuda_events(step: Step) -> Callable[[], float]:
    # The host does not synchronize with the device here, so it launches kernels in advance as in training.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return read


CLOCKS: dict[str, Clock] = {"cpu": _by_wall_clock, "cuda": _by_cuda_events}


def spread(numbers: Sequence[float], name: str) -> dict[str, float]:
    """Return the median, 20th and 80th percentile with the keys `name`, `name_p20` and `name_p80`."""
    if len(numbers) == 1:
        low = high = numbers[0]
    else:
        low, _, _, high = quantiles(numbers, n=5, method="inclusive")
    return {name: median(numbers), f"{name}_p20": low, f"{name}_p80": high}


def against(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Return every step's seconds, and its ratio to the base's time in the same round.

    Args:
        times: seconds from `interleaved`.
        base: name of the baseline in `times`; if it is missing, there are no ratios.

    Returns:
        For each name, a dictionary with seconds and ratio, and with their percentiles.
    """
    summaries = {}
    for name, mine in times.items():
        summaries[name] = spread(mine, "seconds")
        if base in times:
            ratios = [a / b for a, b in zip(mine, times[base], strict=True)]
            summaries[name] |= spread(ratios, "ratio")
    return summaries
