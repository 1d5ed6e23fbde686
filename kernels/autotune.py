"""Autotuning: measures the candidate configurations of each kernel and selects the fastest candidate.

A process spends at most `SECONDS` on tuning, including compilation, so that the first training steps are
not delayed for long. Timings are stored on disk (`tuning_cache`), and later processes measure the remaining
candidates. Nothing is measured without a GPU, in Triton's interpreter, or during CUDA graph capture or
tracing.
"""

import functools
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from fairseq_tutel.kernels.tuning_cache import Timings, TuningCache

logger = logging.getLogger(__name__)

SECONDS = 3.0
VARIABLE = "FAIRSEQ_TUTEL_TUNE_SECONDS"
WARM, TIMED = 3, 7

Config = TypeVar("Config")  # any type whose repr differs between candidates


def pick(
    kind: str, key: tuple[Hashable, ...], candidates: Sequence[Config], launch: Callable[[Config], None]
) -> Config:
    """Return the launch configuration of a kernel, chosen once per process by timing the candidates.

    Args:
        kind: the name of the kernel.
        key: the kernel's sizes as integers, and other values that timings depend on, each with a stable
            repr. Sizes in the same `bucket` share one choice.
        candidates: the configurations, starting with the default. Each must be valid for all sizes of the
            bucket.
        launch: runs the kernel with a candidate; may be called any number of times.
    """
    return _tuner().pick(kind, key, candidates, launch)


def allow(seconds: float) -> None:
    """Set the number of seconds that this process may spend on kernel tuning.

    The environment variable FAIRSEQ_TUTEL_TUNE_SECONDS overrides it.

    Args:
        seconds: 0 selects the default configurations without reading the tuning cache.

    Raises:
        ValueError: the value of the environment variable is not a finite number of at least 0.
    """
    _tuner().seconds = _seconds_of(os.environ.get(VARIABLE), seconds)


def seconds_allowed() -> float:
    """Return the number of seconds that this process may spend on kernel tuning."""
    return _tuner().seconds


def bucket(size: int) -> int:
    """Round a size up to a power of two (1 for 0); sizes with the same result share one configuration."""
    return 1 << max(size - 1, 0).bit_length()


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time in milliseconds of `run` on the current GPU, measured with CUDA events."""
    for _ in range(WARM):
        run()
    pairs = []
    for _ in range(TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def may_measure() -> bool:
    """Return whether kernels can be timed now: on a GPU, and not during graph capture or tracing."""
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return False
    return not torch.cuda.is_current_stream_capturing() and not _interpreted()


class Tuner:
    """The kernel configurations that a process has chosen, and its remaining tuning time.

    Args:
        seconds: the total tuning time.
        open_cache: called when timings are first needed, so that the GPU is not initialized earlier.
        measure: runs a launch and returns its time in milliseconds.
        clock: returns the time in seconds.
        allowed: returns whether a kernel can be timed at this moment.
    """

    def __init__(
        self,
        seconds: float,
        open_cache: Callable[[], TuningCache] = TuningCache.here,
        *,
        measure: Callable[[Callable[[], None]], float] = milliseconds,
        clock: Callable[[], float] = time.perf_counter,
        allowed: Callable[[], bool] = may_measure,
    ) -> None:
        self.seconds, self.spent = seconds, 0.0
        self.open_cache, self.measure = open_cache, measure
        self.clock, self.allowed = clock, allowed
        self.cache: TuningCache | None = None
        self.chosen: dict[tuple[str, tuple[Hashable, ...]], Any] = {}
        self.lock = threading.RLock()  # backward runs in another thread

    def pick(
        self,
        kind: str,
        key: tuple[Hashable, ...],
        candidates: Sequence[Config],
        launch: Callable[[Config], None],
    ) -> Config:
        """Return the launch configuration of a kernel, chosen by timing; see the function `pick`."""
        key = tuple(bucket(part) if type(part) is int else part for part in key)
        if (kind, key) in self.chosen:
            return self.chosen[kind, key]
        # The default is not recorded as the choice, because a later call may be able to measure.
        if self.seconds == 0 or len(candidates) == 1 or not self.allowed():
            return candidates[0]
        with self.lock:
            timings = self._timings(f"{kind} {key!r}", candidates, launch)
            best = candidates[_fastest([timings.get(repr(c)) for c in candidates])]
            logger.info("kernel %s %s: %s of %s", kind, key, best, timings or "none timed")
            self.chosen[kind, key] = best
        return best

    def _timings(
        self, entry: str, candidates: Sequence[Config], launch: Callable[[Config], None]
    ) -> Timings:
        """Return the known timings of the candidates, and time more candidates while time remains."""
        if self.cache is None:
            self.cache = self.open_cache()
        known = self.cache.entries.get(entry, {})
        new: Timings = {}
        for candidate in candidates:
            if repr(candidate) not in known and self.spent < self.seconds:
                new[repr(candidate)] = self._time(candidate, launch)
        if new:
            self.cache.add(entry, new)
        return {**known, **new}

    def _time(self, candidate: Config, launch: Callable[[Config], None]) -> float | str:
        started = self.clock()
        try:
            return self.measure(lambda: launch(candidate))
        except Exception as error:
            if not _cannot_compile(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning("kernel configuration %s cannot run and is skipped: %s", candidate, reason)
            return reason
        finally:
            self.spent += self.clock() - started


def _fastest(timings: Sequence[float | str | None]) -> int:
    """Return the index of the fastest candidate, or of the first candidate that is not known to fail."""
    measured = [(t, i) for i, t in enumerate(timings) if isinstance(t, float | int)]
    if measured:
        return min(measured)[1]
    # If all candidates failed, launching the first candidate raises its error.
    return next((i for i, t in enumerate(timings) if t is None), 0)


def _cannot_compile(error: Exception) -> bool:
    from triton.errors import TritonError

    # Both LLVM failures and GPU errors are RuntimeErrors. GPU errors must not be ignored.
    return isinstance(error, TritonError) or (type(error) is RuntimeError and "PassManager" in str(error))


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _seconds_of(given: str | None, otherwise: float) -> float:
    try:
        seconds = float(given) if given else otherwise
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{VARIABLE} is {given!r}; give the seconds that kernel tuning may take per process, at least "
            "0."
        )
    return seconds


@functools.cache
def _tuner() -> Tuner:
    return Tuner(_seconds_of(os.environ.get(VARIABLE), SECONDS))
