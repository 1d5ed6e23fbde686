"""A backend of `parallel.collectives` that runs collectives with collective plans instead of torch.

It chooses a plan by the collective, the ranks, the number of bytes and the dtype. If no plan fits, torch
runs the collective. All ranks choose the same plan: their plans are the same (`plugin.startup` compares
them) and the values above are equal on all ranks. On CPUs, ranks of one host use shared memory, and ranks
of several hosts also messages. GPUs use messages only.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.parallel import world
from fairseq_tutel.plans.executors.layout import Sizes
from fairseq_tutel.plans.executors.mailboxes import Mailboxes
from fairseq_tutel.plans.executors.one_sided import Call, OneSided
from fairseq_tutel.plans.executors.shared_memory import SharedMemoryError
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.files import PlacedPlan
from fairseq_tutel.plans.format import REDUCING, Plan

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
SUMMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}


class PlanBackend:
    """Runs collectives with the first collective plan that fits, and logs each choice once.

    It implements `parallel.collectives.Backend`. `local` is the number of ranks on a host; 0 means unknown.
    """

    def __init__(self, plans: Iterable[PlacedPlan], local: int = 0) -> None:
        self.plans, self.local = tuple(plans), local
        # By group, then by the plan's digest and whether the tensors are on a CPU.
        self._programs: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], Program]]
        self._programs = WeakKeyDictionary()
        self._logged: set[str] = set()

    def has(self, collective: str, group: Group) -> bool:
        """Return whether a collective plan exists for a collective in a group, for any range of bytes."""
        return bool(self._fitting(collective, group))

    def chosen(self, collective: str, own: Tensor, operation: str, group: Group) -> "Program | None":
        """Return the program that runs a collective with input `own`, or None if torch must run it."""
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
        """Return the program of the all_to_all plan with this name; None if the group has no such plan."""
        for placed in self._fitting("all_to_all", group):
            if placed.name == name:
                return self._program(placed, rows, "the exchange of rows", group)
        return None

    def _fitting(self, collective: str, group: Group) -> list[PlacedPlan]:
        plans = (each for each in self.plans if each.plan.collective == collective)
        return [each for each in plans if each.fits(_ranks(group), self.local)]

    def _hosts(self, group: Group) -> list[int]:
        """Return the host of each rank of a group; all ranks are on host 0 if that is unknown."""
        return [rank // self.local if self.local else 0 for rank in _ranks(group)]

    def _program(self, placed: PlacedPlan, own: Tensor, operation: str, group: Group) -> "Program":
        plan, key = placed.plan, group or dist.group.WORLD
        assert key is not None
        programs = self._programs.setdefault(key, {})
        by = plan.digest, own.is_cpu
        if by not in programs:
            on_cpu = _OnCpu(placed.name, plan, group, self._hosts(group), self._log)
            programs[by] = on_cpu if own.is_cpu else TwoSided(plan, group)
        ranks = f"{plan.ranks} ranks, digest {plan.digest}"
        self._log(f"{operation} uses the collective plan {placed.name} ({ranks})")
        return programs[by]

    def _log(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            if world.is_first():
                logger.info(sentence)


def _ranks(group: Group) -> Sequence[int]:
    return range(world.size()) if group is None else dist.get_process_group_ranks(group)


class _OnCpu:
    """Runs a collective plan in shared memory between ranks of a host, and by messages between hosts.

    `hosts` has the host of each rank of the group. If the ranks of a host cannot share memory, all messages
    use send and receive.

    A call runs in `wait`, not in `start`. In shared memory it needs all ranks at once, and `start` may be
    inside a backward pass in which other ranks still need this rank for another collective.
    """

    def __init__(
        self, name: str, plan: Plan, group: Group, hosts: Sequence[int], log: Callable[[str], None]
    ) -> None:
        self.name, self.plan, self.group, self.hosts, self.log = name, plan, group, hosts, log
        self.program: OneSided | TwoSided | None = None

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> Call:
        return Call(lambda: self._run(own, out, sizes))

    def _run(self, own: Tensor, out: Tensor, sizes: Sizes) -> None:
        if self.program is None:
            try:
                self.program, how = self._shared()
            except SharedMemoryError as error:
                self.program, how = TwoSided(self.plan, self.group), f"by messages: {error}"
            self.log(f"the collective plan {self.name} runs {how}")
        self.program.start(own, out, sizes).wait()

    def _shared(self) -> tuple[OneSided | TwoSided, str]:
        """Return a program that uses shared memory where it can, and the words for the log. Collective."""
        number = len(set(self.hosts))
        if number == 1:
            return OneSided(self.plan, self.group), "in shared memory"
        if number == len(self.hosts):
            return TwoSided(self.plan, self.group), "by messages: each rank is on another host"
        how = "in shared memory on each host, and by messages between hosts"
        return TwoSided(self.plan, self.group, Mailboxes(self.group, self.hosts)), how


Program = _OnCpu | TwoSided
