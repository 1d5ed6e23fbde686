"""Whole experts on the threads of torch's OpenMP team: one parallel region for all of them.

An expert's operations are many and short. Shared out one by one, each begins and ends with all threads
waiting for one another; where another process has one of the cores, that takes a time slice of the system
instead of a microsecond. Here a thread takes an expert, computes it alone and takes the next one: within a
region torch's and MKL's own operations are sequential, and a thread that got no core is not waited for
until the last expert.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Multiplications of an expert, in the mean, below which threads lose more to Python's lock than they save.
LEAST_WORK = 2**21
# Reading an expert's weights takes as long as multiplying so many rows with them.
ROWS_OF_READING = 8
# How much longer than its even share a thread may take; else all threads do one expert after the other.
UNEVEN = 1.25

Worker = Callable[[int], None]


def for_each(make_worker: Callable[[], Worker], counts: Sequence[int], row_work: int) -> None:
    """Call a worker once for every expert; the order, and which thread it is, must not matter.

    Args:
        make_worker: returns what is called with an expert's number. Each thread makes one, with room of its
            own, and calls it without gradients. Views are better made before: each of torch's operations
            lets go of Python's lock, and has to get it back.
        counts: rows of each expert.
        row_work: multiplications of a row with one of the maps.

    Raises:
        BaseException: what a worker raised; other experts may then be done or not.
    """
    together, apart = _shares(counts, row_work)
    if together:
        worker = make_worker()
        for expert in together:
            worker(expert)
    if apart:
        _spread(make_worker, iter(apart))


def _shares(counts: Sequence[int], row_work: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the experts that all threads do together, one by one, and those to be spread over them."""
    threads, all_experts = torch.get_num_threads(), range(len(counts))
    busy = sum(count > 0 for count in counts)
    work = (sum(counts) + ROWS_OF_READING * busy) * row_work
    if threads == 1 or busy < 2 or work < LEAST_WORK * busy or _region() is None:
        return all_experts, ()
    experts = sorted(all_experts, key=lambda expert: -counts[expert])
    rest, first = sum(counts), 0
    # The other threads would wait for such a one.
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
            # Modes are of a thread.
            with torch.inference_mode(inference), torch.no_grad():
                worker = make_worker()
                for expert in experts:  # a list's iterator gives every thread another one
                    worker(expert)
        except BaseException as error:  # must not pass through C
            raised.append(error)

    found = _region()
    assert found is not None
    region, kind = found
    region(kind(member), None, 0, 0)
    if raised:
        raise raised[0]


@functools.cache
def _region() -> tuple[Any, Any] | None:
    """Return what runs a function on every thread, and that function's type; None without OpenMP."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        region = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # LLVM's and Intel's have it, too
    except (OSError, AttributeError):
        return None
    region.argtypes = [kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    region.restype = None
    return region, kind
