"""Runs experts in parallel on a CPU, each expert on one thread of torch's OpenMP thread pool.

An expert runs many short operations. If each operation ran on all threads, every operation would begin and
end with a barrier. If another process occupies a core, a barrier takes a time slice instead of a
microsecond. Therefore each thread computes one expert at a time. Within the parallel region, torch and MKL
operations are sequential. The only barrier is at the end of the parallel region.
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
# If a thread would get more than UNEVEN times as many rows as the mean, all threads share each expert.
UNEVEN = 1.25

Worker = Callable[[int], None]


def for_each(make_worker: Callable[[], Worker], counts: Sequence[int], row_work: int) -> None:
    """Call a worker function once for every expert, in any order and on any thread.

    Args:
        make_worker: a function that returns a worker function, which is called with an expert's number.
            Each thread creates one worker function with separate buffers, and calls it without gradients.
            Create views beforehand, because every torch operation releases and acquires the GIL.
        counts: the number of rows of each expert.
        row_work: the number of multiplications of one row with one weight.

    Raises:
        BaseException: the first error of a worker. Other experts may not have been computed.
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
    # If one thread computed an expert with more than an even part of the rows, other threads would wait.
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
            # Inference mode and gradient mode are thread-local.
            with torch.inference_mode(inference), torch.no_grad():
                worker = make_worker()
                for expert in experts:  # The threads share this iterator, which is atomic.
                    worker(expert)
        except BaseException as error:  # An error must not propagate through C.
            raised.append(error)

    found = _region()
    assert found is not None
    region, kind = found
    region(kind(member), None, 0, 0)
    if raised:
        raise raised[0]


@functools.cache
def _region() -> tuple[Any, Any] | None:
    """Return OpenMP's function for parallel regions and its callback type, or None without OpenMP."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        region = ctypes.CDLL(
            torch._C.__file__
        ).GOMP_parallel  # LLVM's and Intel's OpenMP also have this function.
    except (OSError, AttributeError):
        return None
    region.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    region.restype = None
    return region, kind
