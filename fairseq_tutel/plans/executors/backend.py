"""Runs collectives with collective plans instead of torch, as a backend of `parallel.collectives`.

The backend chooses a collective plan by the collective, the ranks, the number of bytes and the dtype. If no
collective plan fits, torch runs the collective. All ranks choose the same collective plan, because they
have the same plans, as `plugin.startup` checks. On CPUs, the ranks of one host run a plan in shared memory.
Ranks on several hosts, and ranks on GPUs, run a plan by sending messages.
"""

import logging
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.parallel import world
from fairseq_tutel.plans.executors.layout import Sizes
from fairseq_tutel.plans.executors.one_sided import Call, OneSided
from fairseq_tutel.plans.executors.shared_memory import SharedMemoryError
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.files import PlacedPlan
from fairseq_tutel.plans.format import REDUCING, Plan

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
SUMMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}


class PlanBackend:
    """Runs each collective with the first collective plan that fits, and logs each choice once.

    `parallel.collectives` uses this class. `local` is the number of ranks on a host; 0 means unknown.
    """

    def __init__(self, plans: Iterable[PlacedPlan], local: int = 0) -> None:
        self.plans, self.local = tuple(plans), local
        # The programs are stored by group, then by the plan's digest and whether the tensors are on a CPU.
        self._programs: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], Program]]
        self._programs = WeakKeyDictionary()
        self._logged: set[str] = set()

    def has(self, collective: str, group: Group) -> bool:
        """Return whether a collective has a plan in a group for at least one number of bytes."""
        return bool(self._fitting(collective, group))

    def chosen(self, collective: str, own: Tensor, operation: str, group: Group) -> "Program | None":
        """Return the program that runs a collective with the input `own`, or None if torch must run it."""
        plans = self._fitting(collective, group)
        if not plans:
            return None
        if collective in REDUCING and own.dtype not in SUMMED:
            self._log(f"{operation} uses torch, because collective plans cannot sum {own.dtype}")
            return None
        num_bytes = own.numel() * own.itemsize
        for placed in plans:
            least, most = placed.plan.min_bytes, placed.plan.max_bytes
            if least <= num_bytes and (most is None or num_bytes <= most):
                return self._program(placed, own, operation, group)
        self._log(f"{operation} uses torch for sizes without a collective plan for {collective}")
        return None

    def named(self, name: str, rows: Tensor, group: Group) -> "Program | None":
        """Return the program of the named all_to_all plan, or None if the group has no such plan."""
        for placed in self._fitting("all_to_all", group):
            if placed.name == name:
                return self._program(placed, rows, "the exchange of rows", group)
        return None

    def _fitting(self, collective: str, group: Group) -> list[PlacedPlan]:
        plans = (each for each in self.plans if each.plan.collective == collective)
        return [each for each in plans if each.fits(_ranks(group))]

    def _program(self, placed: PlacedPlan, own: Tensor, operation: str, group: Group) -> "Program":
        plan, key = placed.plan, group or dist.group.WORLD
        assert key is not None
        programs = self._programs.setdefault(key, {})
        by = plan.digest, own.is_cpu
        if by not in programs:
            hosts = {rank // self.local if self.local else 0 for rank in _ranks(group)}
            programs[by] = (
                _InSharedMemory(plan, group) if own.is_cpu and len(hosts) == 1 else TwoSided(plan, group)
            )
        self._log(f"{operation} uses the collective plan {placed.name} (digest {plan.digest})")
        return programs[by]

    def _log(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            if world.is_first():
                logger.info(sentence)


def _ranks(group: Group) -> Sequence[int]:
    return range(world.size()) if group is None else dist.get_process_group_ranks(group)


class _InSharedMemory:
    """Runs a collective plan in shared memory, or by messages if the ranks cannot share memory.

    A call runs the plan in `wait`, not in `start`, because all ranks must run the plan at the same time. A
    backward pass may call `start` while other ranks still need this rank for another collective.
    """

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group
        self.program: OneSided | TwoSided | None = None

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        return Call(lambda: self._run(own, out, sizes))

    def _run(self, own: Tensor, out: Tensor, sizes: Sizes) -> None:
        if self.program is None:
            try:
                self.program = OneSided(self.plan, self.group)
            except SharedMemoryError as error:
                self.program = TwoSided(self.plan, self.group)
                if world.is_first():
                    logger.info("a collective plan runs by messages: %s", error)
        self.program.start(own, out, sizes).wait()


Program = _InSharedMemory | TwoSided
