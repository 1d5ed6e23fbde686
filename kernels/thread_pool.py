"""Runs experts in parallel on a CPU: each expert on one thread of torch's OpenMP thread pool.

The operations of an expert are many and short. If each operation ran on all threads, it would begin and end
with a barrier. A barrier takes a time slice instead of a microsecond when another process occupies a core.
Therefore each thread computes one expert at a time. Within the region, torch and MKL operations are
sequential, and the only barrier is at the end of the region.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Below this mean number of multiplications per expert, threads lose more time to the GIL than they save.
LEAST_WORK = 2**21
# Reading an expert's weights takes as long as multiplying this many rows with the weights.
ROWS_OF_READING = 8
# Limit of a thread's rows relative to the mean. Above it, all threads compute each expert together.
UNEVEN = 1.25

Worker = Callable[[int], None]


def for_each(make_worker: Callable[[], Worker], counts: Sequence[int], row_work: int) -> None:
    """Call a worker function once for every expert, in any order and on any thread.

    Args:
        make_worker: returns a function that is called with an expert's number. Each thread creates one such
            function, with separate buffers, and calls it without gradients. Create views beforehand: every
            torch operation releases the GIL and has to acquire it again.
        counts: the number of rows of each expert.
        row_work: the multiplications of one row with one weight.

    Raises:
        BaseException: the first error of a worker; other experts may not have been computed.
    """
    together, apart = _shares(counts, row_work)
    if together:
        worker = make_worker()
        for expert in together:
            worker(expert)
    if apart:
        _spread(make_worker, iter(apart))


def _shares(counts: Sequence[int], row_work: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the experts that all threads compute together, and the experts that single threads compute."""
    threads, all_experts = torch.get_num_threads(), range(len(counts))
    busy = sum(count > 0 for count in counts)
    work = (sum(counts) + ROWS_OF_READING * busy) * row_work
    if threads == 1 or busy < 2 or work < LEAST_WORK * busy or _region() is None:
        return all_experts, ()
    experts = sorted(all_experts, key=lambda expert: -counts[expert])
    rest, first = sum(counts), 0
    # The other threads would have to wait for an expert with more than an even share of the rows.
    while first < len(experts) and counts[experts[first]] * threads > rest:
        rest, first = rest - counts[experts[first]], first + 1
    loads = [0] * threads
    for expert in experts[first:]:
        loads[loads.index(min(loads))] += counts[expert]
    if max(loads) * threads > UNEVEN * rest:
        return all_experts, ()
    return experts[:first], experts[first:]


def _spread(make_worker: Callable[[], Worker], experts: Iterator[int]) -> None:
    raised: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()

    def member(_: Any) -> None:
        try:
            # These modes are thread-local.
            with torch.inference_mode(inference), torch.no_grad():
                worker = make_worker()
                for expert in experts:  # the threads share one list iterator, which is atomic
                    worker(expert)
        except BaseException as error:  # must not propagate through C
            raised.append(error)

    found = _region()
    assert found is not None
    region, kind = found
    region(kind(member), None, 0, 0)
    if raised:
        raise raised[0]


@functools.cache
def _region() -> tuple[Any, Any] | None:
    """Find OpenMP's function for parallel regions; return it and its callback type, or None."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        region = ctypes.CDLL(
            torch._C.__file__
        ).GOMP_parallel  # LLVM's and Intel's OpenMP also have this function
    except (OSError, AttributeError):
        return None
    region.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    region.restype = None
    return region, kind
