"""Runs a collective plan (a table of steps) in plain torch, for ranks that share one memory.

An instance is one lane of one rank. `memory` [calls * E + 2 * S] holds the data of all calls, E elements
per call, followed by two temporary areas of S elements. A call uses the temporary area of its parity.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOVE, SIGNAL, WAIT = range(3)
COLUMNS = 5
SPINS = 1 << 22  # polls of a semaphore before a wait fails, as a count instead of a time


class PlanTable(NamedTuple):
    """The table of steps of a collective plan, for all ranks and their lanes.

    An offset p >= 0 is element p of the call's data. An offset p < 0 is temporary element -1 - p. The
    columns of a row are:

    | step   | which        | to             | length                 | value |
    |--------|--------------|----------------|------------------------|-------|
    | MOVE   | first source | offset         | elements               | number of sources, summed in order |
    | SIGNAL | semaphore    |                |                        |       |
    | WAIT   | semaphore    |                | its signals per call   | number of signals to wait for |

    Attributes:
        rows: [rows, COLUMNS] int32, ordered by instance.
        sources: offsets, int32.
        bounds: [instances, levels + 1] int32: the bounds of each level's rows per instance. A step waits
            only for signals of earlier levels.
        semaphores: the number of semaphores.
        call_elements: E.
        tmp_elements: S.
    """

    rows: Tensor
    sources: Tensor
    bounds: Tensor
    semaphores: int
    call_elements: int
    tmp_elements: int


def run_plan(memory: Tensor, table: PlanTable, calls: int, spins: int = SPINS) -> Tensor:
    """Run a collective plan in plain torch, for several consecutive calls of the collective.

    Args:
        memory: modified in place, contiguous. Half dtypes are summed in fp32 and rounded once.
        table: the plan, on the same device.
        calls: the number of calls; the first call has parity 0.
        spins: polls of a semaphore before a wait fails; unused here, because instances run sequentially.

    Returns:
        [instances] int32: the semaphore whose wait failed, which stops the instance; -1 without failure.
    """
    rows, sources, bounds = (each.tolist() for each in table[:3])
    counts, stuck = [0] * table.semaphores, [-1] * len(bounds)
    wide = torch.float32 if memory.dtype in (torch.float16, torch.bfloat16) else memory.dtype
    for call in range(calls):
        first_tmp = calls * table.call_elements + call % 2 * table.tmp_elements

        def part(place: int, length: int, call: int = call, first_tmp: int = first_tmp) -> Tensor:
            at = first_tmp - 1 - place if place < 0 else call * table.call_elements + place
            return memory[at : at + length]

        for level in range(len(bounds[0]) - 1):
            for instance, own in enumerate(bounds):
                for op, which, to, length, value in rows[own[level] : own[level + 1]]:
                    if stuck[instance] >= 0:
                        break
                    if op == MOVE:
                        first, *others = sources[which : which + value]
                        total = part(first, length).to(wide, copy=True)
                        for other in others:
                            total += part(other, length)
                        part(to, length).copy_(total)
                    elif op == SIGNAL:
                        counts[which] += 1
                    elif counts[which] < call * length + value:
                        stuck[instance] = which
    return torch.tensor(stuck, dtype=torch.int32, device=memory.device)
