"""Executor that runs a collective plan on one device: each lane of each rank is a Triton kernel instance.

Only tests use this executor. It tests plans with the memory order of a GPU, on a single GPU. The steps of a
plan become a table of numbers (`kernels/reference_plan.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.reference_plan import COLUMNS, MOVE, SIGNAL, SPINS, WAIT, PlanTable
from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.executors.layout import Layout, Sizes, walk
from fairseq_tutel.plans.format import Plan


class OnOneDevice:
    """Runs a collective plan for all ranks on one device; the checker must have accepted the plan.

    `backend` takes the values of --moe-backend. The attribute `sizes` has the elements of each rank's `in`,
    then of each rank's `out`.
    """

    def __init__(self, plan: Plan, sizes: Sizes, device: torch.device, backend: str = "auto") -> None:
        self.plan = plan
        self._is_triton = kernels.backend_for(backend, device)[0] == "triton"
        layout, order = Layout(walk(plan), sizes), Order(plan)
        self.sizes = [layout.starts(r, b)[-1] for b in ("in", "out") for r in range(plan.ranks)]
        self._lanes = [(r, i) for r, own in enumerate(order.rank_lanes) for i in range(len(own))]
        self.table, self._names = _table(layout, order, self.sizes, device)

    def run(self, ins: Sequence[Tensor], spins: int = SPINS) -> list[Tensor]:
        """Run the plan several times in a row, and return the output of each rank, [calls, elements].

        `ins` has each rank's `in`, [calls, elements]. A wait gives up after `spins` checks of a semaphore.

        Raises:
            RuntimeError: a wait gave up; the message names ranks, lanes and semaphores.
            ValueError: the GPU cannot run all lanes at once.
        """
        calls, table = ins[0].shape[0], self.table
        memory = ins[0].new_empty(calls * table.call_elements + 2 * table.tmp_elements)
        of_calls = memory[: calls * table.call_elements].view(calls, table.call_elements)
        parts = of_calls.split(self.sizes, dim=1)
        for part, own in zip(parts, ins, strict=False):  # the `out` parts follow
            part.copy_(own)
        if self._is_triton:
            from fairseq_tutel.kernels.triton_plan import run_plan
        else:
            from fairseq_tutel.kernels.reference_plan import run_plan
        stuck = run_plan(memory, table, calls, spins).tolist()
        waiting = ", ".join(
            f"rank {rank}, lane {lane} for {self._names[semaphore]}"
            for (rank, lane), semaphore in zip(self._lanes, stuck, strict=True)
            if semaphore >= 0
        )
        if waiting:
            raise RuntimeError(f"Plan {self.plan.name!r} stopped, because waits got no signal: {waiting}.")
        return list(parts[self.plan.ranks :])


def _table(
    layout: Layout, order: Order, sizes: list[int], device: torch.device
) -> tuple[PlanTable, list[str]]:
    """Return a plan's steps as tables of numbers for the kernel, and the names of the semaphores."""
    plan = layout.plan
    starts = [0, *accumulate(sizes)]
    tmp_starts = [0, *accumulate(layout.starts(rank, "tmp")[-1] for rank in range(plan.ranks))]

    def place(rank: int, buffer: str, element: int) -> int:
        if buffer == "tmp":
            return -1 - tmp_starts[rank] - element
        return starts[rank + plan.ranks * (buffer == "out")] + element

    moves = {move.site: move for move in layout.walked.moves}
    levels = _levels(order)
    rows: list[tuple[int, ...]] = []
    sources: list[int] = []
    row_levels: list[list[int]] = [[] for own in order.rank_lanes for _ in own]
    names = [_semaphore(order, number) for number in range(len(order.steps))]
    found = sorted({name for name in names if name})
    number_of = {name: number for number, name in enumerate(found)}
    per_call = Counter(names[number] for number in order.cause)
    taken: Counter[str] = Counter()
    for number, (step, site, name) in enumerate(zip(order.steps, order.sites, names, strict=True)):
        before = len(rows)
        if step.dst is not None:
            move = moves[site]
            for ends, length in layout.runs(move.kinds, *move.sources, move.target):
                *own, to = (place(*end) for end in ends)
                rows.append((MOVE, len(sources), to, length, len(own)))
                sources += own
        elif number in order.cause:
            taken[name] += 1
            rows.append((WAIT, number_of[name], 0, per_call[name], taken[name]))
        elif name:
            rows.append((SIGNAL, number_of[name], 0, 0, 0))
        row_levels[order.lanes[number]] += [levels[number]] * (len(rows) - before)
    first_rows = accumulate(map(len, row_levels), initial=0)
    bounds = [
        [first + bisect_left(own, level) for level in range(max(levels, default=0) + 2)]
        for first, own in zip(first_rows, row_levels, strict=False)
    ]

    def tensor(values: list[int] | list[tuple[int, ...]] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = tensor(rows).view(-1, COLUMNS), tensor(sources), tensor(bounds)
    return PlanTable(*table, len(found), starts[-1], tmp_starts[-1]), found


def _semaphore(order: Order, number: int) -> str:
    """Return the name of the semaphore that a step uses, or an empty string if it uses none."""
    step = order.steps[number]
    if step.op in ("signal", "wait"):
        return f"channel {step.channel}"
    if step.semaphore is not None:
        return f"semaphore {step.semaphore} of rank {order.sites[number][0]}"
    return ""


def _levels(order: Order) -> list[int]:
    """Return, for each step, the length of the longest chain of signals and posts before it."""
    levels = [0] * len(order.steps)
    of_lane: Counter[int] = Counter()
    for number in order.run:
        lane = order.lanes[number]
        if number in order.cause:
            of_lane[lane] = max(of_lane[lane], levels[order.cause[number]] + 1)
        levels[number] = of_lane[lane]
    return levels
