"""Autotuning: measures the candidate configurations of each kernel and selects the fastest candidate.

A process spends at most `SECONDS` on measuring. Compiling is not included: the candidates of a kernel are
compiled at the same time, once per machine. Timings are stored on disk (`tuning_cache`). Ranks that tune
the same kernel begin with different candidates and read each other's timings. Nothing is measured without a
GPU, in Triton's interpreter, or during CUDA graph capture or tracing.
"""

import functools
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tuning_cache import Timings, TuningCache

logger = logging.getLogger(__name__)

SECONDS = 3.0
VARIABLE = "FAIRSEQ_TUTEL_TUNE_SECONDS"
WARM, TIMED = 3, 7

Config = TypeVar("Config")  # any type whose repr differs between candidates


def pick(
    kind: str,
    key: tuple[Hashable, ...],
    candidates: Callable[[], Sequence[Config]],
    launch: Callable[[Config], None],
) -> Config:
    """Return the launch configuration of a kernel, chosen once per process by timing the candidates.

    Args:
        kind: the name of the kernel.
        key: the kernel's sizes as integers, and other values that timings depend on, each with a stable
            repr. Sizes in the same `bucket` share their timings.
        candidates: returns the configurations, starting with the default. It is not called once a
            configuration is chosen. Each must be valid for all sizes of the bucket.
        launch: runs the kernel with a candidate; may be called any number of times, in any thread.
    """
    return _tuner().pick(kind, key, candidates, launch)


def allow(seconds: float) -> None:
    """Set the number of seconds that this process may spend on measuring kernels.

    The environment variable FAIRSEQ_TUTEL_TUNE_SECONDS overrides it.

    Args:
        seconds: 0 selects the default configurations without reading the tuning cache.

    Raises:
        ValueError: the value of the environment variable is not a finite number of at least 0.
    """
    _tuner().seconds = _seconds_of(os.environ.get(VARIABLE), seconds)


def seconds_allowed() -> float:
    """Return the number of seconds that this process may spend on measuring kernels."""
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
    return not torch.cuda.is_current_stream_capturing() and not interpreted()


def launch_all(launches: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """Run each launch once, in a thread of its own; return the errors, or None.

    Triton compiles a kernel at its first launch, and its compiler releases the GIL.
    """
    stream = torch.cuda.current_stream()

    def run(launch: Callable[[], None]) -> None:
        with torch.cuda.stream(stream), torch.no_grad():  # both are settings of a thread
            launch()

    with ThreadPoolExecutor(len(launches)) as pool:
        return [future.exception() for future in [pool.submit(run, launch) for launch in launches]]


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a process group.

    Only ranks of this host count if the launcher sets their number, because hosts rarely share a cache.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank, ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if rank and ranks:
        return int(rank), int(ranks)
    return dist.get_rank(), dist.get_world_size()


class Tuner:
    """The kernel configurations that a process has chosen, and its remaining tuning time.

    Args:
        seconds: the total time for measuring, without compilation.
        open_cache: called when timings are first needed, so that the GPU is not initialized earlier.
        measure: runs a launch and returns its time in milliseconds.
        compile_all: runs each launch once and returns their errors, or None.
        clock: returns the time in seconds.
        allowed: returns whether a kernel can be timed at this moment.
        place: returns this process's rank and the number of ranks, which share the work.
    """

    def __init__(
        self,
        seconds: float,
        open_cache: Callable[[], TuningCache] = TuningCache.here,
        *,
        measure: Callable[[Callable[[], None]], float] = milliseconds,
        compile_all: Callable[[Sequence[Callable[[], None]]], list[BaseException | None]] = launch_all,
        clock: Callable[[], float] = time.perf_counter,
        allowed: Callable[[], bool] = may_measure,
        place: Callable[[], tuple[int, int]] = rank_and_ranks,
    ) -> None:
        self.seconds, self.spent = seconds, 0.0
        self.open_cache, self.measure, self.compile_all = open_cache, measure, compile_all
        self.clock, self.allowed, self.place = clock, allowed, place
        self.cache: TuningCache | None = None
        self.chosen: dict[tuple[str, tuple[Hashable, ...]], Any] = {}
        self.lock = threading.RLock()  # backward runs in another thread

    def pick(
        self,
        kind: str,
        key: tuple[Hashable, ...],
        candidates: Callable[[], Sequence[Config]],
        launch: Callable[[Config], None],
    ) -> Config:
        """Return the launch configuration of a kernel, chosen by timing; see the function `pick`."""
        found = self.chosen.get((kind, key))
        if found is not None:
            return found
        choices = candidates()
        # The default is not recorded as the choice, because a later call may be able to measure.
        if self.seconds == 0 or len(choices) == 1 or not self.allowed():
            return choices[0]
        with self.lock:
            sizes = tuple(bucket(part) if type(part) is int else part for part in key)
            timings = self._timings(f"{kind} {sizes!r}", choices, launch)
            best = choices[_fastest([timings.get(repr(c)) for c in choices])]
            logger.info("kernel %s %s: %s of %s", kind, sizes, best, timings or "none timed")
            self.chosen[kind, key] = best
        return best

    def _timings(
        self, entry: str, candidates: Sequence[Config], launch: Callable[[Config], None]
    ) -> Timings:
        """Return the known timings of the candidates, and time more candidates while time remains.

        Every rank begins with another candidate, and skips those that other ranks have written to disk.
        """
        if self.cache is None:
            self.cache = self.open_cache()
        rank, ranks = self.place()
        first = rank * len(candidates) // ranks
        order = [*candidates[first:], *candidates[:first]]
        share = -(-len(order) // ranks)
        while self.spent < self.seconds:
            known = self.cache.entries.get(entry, {})
            batch = [c for c in order if repr(c) not in known][:share]
            if not batch:
                break
            self.cache.add(entry, self._timed(batch, launch))  # also reads what other ranks have measured
            share = 1
        return self.cache.entries.get(entry, {})

    def _timed(self, batch: Sequence[Config], launch: Callable[[Config], None]) -> Timings:
        """Compile the candidates of a batch, and time them while time remains."""
        errors = self.compile_all([functools.partial(launch, candidate) for candidate in batch])
        timings: Timings = {}
        for candidate, error in zip(batch, errors, strict=True):
            if error is not None:
                timings[repr(candidate)] = _reason(candidate, error)
            elif self.spent < self.seconds:
                started = self.clock()
                timings[repr(candidate)] = self.measure(functools.partial(launch, candidate))
                self.spent += self.clock() - started
        return timings


def _reason(candidate: Any, error: BaseException) -> str:
    """Return why a candidate cannot run, after a warning; raise any other error."""
    if not _cannot_compile(error):
        raise error
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    logger.warning("kernel configuration %s cannot run and is skipped: %s", candidate, reason)
    return reason


def _fastest(timings: Sequence[float | str | None]) -> int:
    """Return the index of the fastest candidate, or of the first candidate that is not known to fail."""
    measured = [(t, i) for i, t in enumerate(timings) if isinstance(t, float | int)]
    if measured:
        return min(measured)[1]
    # If all candidates failed, launching the first candidate raises its error.
    return next((i for i, t in enumerate(timings) if t is None), 0)


def _cannot_compile(error: BaseException) -> bool:
    from triton.errors import TritonError

    # Both LLVM failures and GPU errors are RuntimeErrors. GPU errors must not be ignored.
    return isinstance(error, TritonError) or (type(error) is RuntimeError and "PassManager" in str(error))


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
