"""Which of a few configurations a kernel is launched with, chosen by measuring them where they run.

A process spends `SECONDS` in all on it, compilation included, so that no first step waits for long; what it
does not get to, a later process measures, since timings are kept on disk (`tuning_cache`). Nothing is
measured without a GPU, in the interpreter, while a CUDA graph is captured or while torch.compile traces.
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

Config = TypeVar("Config")  # anything that its repr tells from the other candidates


def pick(
    kind: str,
    key: tuple[Hashable, ...],
    candidates: Sequence[Config],
    launch: Callable[[Config], None],
) -> Config:
    """Return the candidate to launch with; the same one for the rest of the process once it is settled.

    Args:
        kind: which kernel.
        key: its sizes, as whole numbers, and whatever else timings depend on, of things with a stable
            repr. Sizes of one `bucket` share what is found.
        candidates: the default first; each must be right for all sizes of the class.
        launch: runs the kernel with a candidate; must be safe to call any number of times.
    """
    return _tuner().pick(kind, key, candidates, launch)


def allow(seconds: float) -> None:
    """Set what this process spends on measuring in all; $FAIRSEQ_TUTEL_TUNE_SECONDS goes before.

    Args:
        seconds: 0 takes the defaults and does not look at the disk either.

    Raises:
        ValueError: the environment's value is no such number.
    """
    _tuner().seconds = _seconds_of(os.environ.get(VARIABLE), seconds)


def seconds_allowed() -> float:
    """Return what this process may spend on measuring in all."""
    return _tuner().seconds


def bucket(size: int) -> int:
    """Return the smallest power of two that is at least `size`, 1 for 0: sizes of one class."""
    return 1 << max(size - 1, 0).bit_length()


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time that `run` takes on the current GPU, by events."""
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
    """Whether here and now a kernel can be timed."""
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return False
    return not torch.cuda.is_current_stream_capturing() and not _interpreted()


class Tuner:
    """What a process has chosen, and what it may still spend.

    Args:
        seconds: to spend in all.
        open_cache: called when timings are first needed: before that no GPU may be asked for its name.
        measure: from a launch to milliseconds.
        clock: in seconds.
        allowed: whether anything can be timed now.
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
        self.lock = threading.RLock()  # backward runs in a thread of its own

    def pick(
        self,
        kind: str,
        key: tuple[Hashable, ...],
        candidates: Sequence[Config],
        launch: Callable[[Config], None],
    ) -> Config:
        """See the function of this name."""
        key = tuple(bucket(part) if type(part) is int else part for part in key)
        if (kind, key) in self.chosen:
            return self.chosen[kind, key]
        # Not settled where nothing can be timed now: a later call may be where it can.
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
        """Return the known timings, of as many more candidates as there is time for."""
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
            logger.warning("a configuration of a kernel is left out: %s: %s", candidate, reason)
            return reason
        finally:
            self.spent += self.clock() - started


def _fastest(timings: Sequence[float | str | None]) -> int:
    """Return the index of the fastest that was measured; if none was, of the first that may run."""
    measured = [(t, i) for i, t in enumerate(timings) if isinstance(t, float | int)]
    if measured:
        return min(measured)[1]
    # If none may, the first says why when it is launched.
    return next((i for i, t in enumerate(timings) if t is None), 0)


def _cannot_compile(error: Exception) -> bool:
    from triton.errors import TritonError

    # What goes wrong in LLVM is a RuntimeError, as errors of the GPU are, which nobody may pass over.
    return isinstance(error, TritonError) or (
        type(error) is RuntimeError and "PassManager" in str(error)
    )


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
            f"{VARIABLE} is {given!r}; give the seconds that a process may measure kernels, at least 0."
        )
    return seconds


@functools.cache
def _tuner() -> Tuner:
    return Tuner(_seconds_of(os.environ.get(VARIABLE), SECONDS))
