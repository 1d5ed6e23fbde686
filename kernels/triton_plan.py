"""Runs a collective plan on ranks that share one GPU, in one Triton kernel.

Each program is one lane of a rank. Programs wait for each other within one launch, so all programs must be
resident. Their number is therefore at most the number of multiprocessors of the GPU. A signal is an atomic
addition with release order. A wait polls with acquire order until it reads the required count. Barriers
before and after extend the order to all threads of a program. In the interpreter, programs run one after
another, and every level is a separate launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.reference_plan import COLUMNS, MOVE, SIGNAL, SPINS, PlanTable
from fairseq_tutel.kernels.triton_launch import launch

LINE = 32  # distance of semaphores in int32, so that each has a separate cache line of 128 bytes
# BLOCK is not tuned.
CONSTANTS = {"COLUMNS": COLUMNS, "MOVE": MOVE, "SIGNAL": SIGNAL, "LINE": LINE, "BLOCK": 256}
# With several warps, a barrier on AMD would not wait for the stores of all warps, which a release must
# cover. With several pipeline stages, a load could move before a wait.
OPTIONS = {"num_warps": 1, "num_stages": 1}
TABLES = ("rows", "sources", "bounds", "semaphores", "stuck")
NUMBERS = (
    "levels", "first_level", "end_level", "first_call", "end_call", "tmp_start", "call_elements",
    "tmp_elements", "spins",
)  # fmt: skip


def run_plan(memory: Tensor, table: PlanTable, calls: int, spins: int = SPINS) -> Tensor:
    """Run a collective plan for several consecutive calls, as `reference_plan.run_plan` does.

    Raises:
        ValueError: the GPU has fewer multiprocessors than the plan has instances.
    """
    instances, levels = table.bounds.shape[0], table.bounds.shape[1] - 1
    if not interpreted():
        most = torch.cuda.get_device_properties(memory.device).multi_processor_count
        if instances > most:
            raise ValueError(
                f"The collective plan has {instances} lanes that must run together, but the GPU runs at "
                f"most {most}; use a plan with fewer ranks or lanes."
            )
    semaphores = table.rows.new_zeros(table.semaphores * LINE)
    stuck = table.rows.new_full((instances,), -1)
    ranges = [(0, levels, 0, calls)]
    if interpreted():
        ranges = [(at, at + 1, call, call + 1) for call in range(calls) for at in range(levels)]
    for each in ranges:
        launch(
            _plan_kernel,
            (instances,),
            memory.device,
            memory,
            table.rows,
            table.sources,
            table.bounds,
            semaphores,
            stuck,
            levels,
            *each,
            calls * table.call_elements,
            table.call_elements,
            table.tmp_elements,
            spins,
            IN_FP32=memory.dtype in (torch.float16, torch.bfloat16),
            **CONSTANTS,
            **OPTIONS,
        )
    return stuck


@triton.jit(do_not_specialize=NUMBERS)
def _plan_kernel(
    memory,
    rows,
    sources,
    bounds,
    semaphores,
    stuck,
    levels,
    first_level,
    end_level,
    first_call,
    end_call,
    tmp_start,
    call_elements,
    tmp_elements,
    spins,
    IN_FP32: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOVE: tl.constexpr,
    SIGNAL: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    instance = tl.program_id(0)
    first_row = tl.load(bounds + instance * (levels + 1) + first_level)
    end_row = tl.load(bounds + instance * (levels + 1) + end_level)
    stuck_at = tl.load(stuck + instance)
    call = first_call
    while call < end_call:
        call_at = tl.cast(call, tl.int64) * call_elements
        tmp_at = tl.cast(tmp_start, tl.int64) + call % 2 * tmp_elements
        row = first_row
        while (row < end_row) & (stuck_at < 0):
            op = tl.load(rows + row * COLUMNS)
            which = tl.load(rows + row * COLUMNS + 1)
            length = tl.load(rows + row * COLUMNS + 3)
            value = tl.load(rows + row * COLUMNS + 4)
            if op == MOVE:
                to = memory + _address(tl.load(rows + row * COLUMNS + 2), call_at, tmp_at)
                first = memory + _address(tl.load(sources + which), call_at, tmp_at)
                for start in range(0, length, BLOCK):
                    element = start + tl.arange(0, BLOCK)
                    inside = element < length
                    total = tl.load(first + element, mask=inside)
                    if IN_FP32:
                        total = total.to(tl.float32)
                    for source in range(1, value):
                        other = memory + _address(tl.load(sources + which + source), call_at, tmp_at)
                        total += tl.load(other + element, mask=inside)
                    tl.store(to + element, total.to(memory.dtype.element_ty), mask=inside)
            elif op == SIGNAL:
                tl.atomic_add(semaphores + which * LINE, 1, sem="release", scope="gpu")
            else:
                wanted = call * length + value
                count = tl.atomic_add(semaphores + which * LINE, 0, sem="acquire", scope="gpu")
                looks = 0
                while (count < wanted) & (looks < spins):
                    count = tl.atomic_add(semaphores + which * LINE, 0, sem="acquire", scope="gpu")
                    looks += 1
                if count < wanted:
                    stuck_at = which
            # The barrier makes the step's loads and stores visible to all threads before the next step.
            tl.debug_barrier()
            row += 1
        call += 1
    tl.store(stuck + instance, stuck_at)


@triton.jit
def _address(place, call_at, tmp_at):
    """Convert an offset in a collective plan's table to an index into the ranks' memory."""
    return tl.where(place < 0, tmp_at - 1 - place, call_at + place)
