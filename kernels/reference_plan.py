"""A plan whose ranks are in one memory, as a table of steps: what it means, and a loop that takes it.

An instance is one lane of one rank. `memory` [calls * E + 2 * S] holds what callers have, E elements a
call, and behind that twice S temporary ones, of which a call has those of its parity.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOVE, SIGNAL, WAIT = range(3)
COLUMNS = 5
SPINS = 1 << 22  # looks at a semaphore before a wait gives up: a bound, not a time


class PlanTable(NamedTuple):
    """The steps of all instances.

    A place p >= 0 is element p of its call, p < 0 temporary element -1 - p. Rows are:

    | step   | which        | to             | length                 | value |
    |--------|--------------|----------------|------------------------|-------|
    | MOVE   | first source | place          | elements               | sources; their sum, in order |
    | SIGNAL | semaphore    |                |                        |       |
    | WAIT   | semaphore    |                | its signals in a call  | how many of them are to be there |

    Attributes:
        rows: [rows, COLUMNS] int32, an instance's after another's.
        sources: places, int32.
        bounds: [instances, levels + 1] int32: between which rows an instance's steps of a level are. What a
            step waits for is of an earlier level.
        semaphores: how many.
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
    """Run a plan for some calls in a row; of the first, temporary elements are those of parity 0.

    Args:
        memory: changed in place, contiguous; half types are summed in fp32 and rounded once.
        table: on the same device.
        calls: how many.
        spins: how often a wait looks before it gives up; here nothing happens while it looks.

    Returns:
        [instances] int32: the semaphore at which one gave up, and did nothing more, or -1.
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
