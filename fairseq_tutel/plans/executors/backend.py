"""Which collective runs by which plan: by its kind, ranks, bytes and dtype; torch runs the others.

On a CPU, ranks of one host run a plan in shared memory, others by messages, as all do on a GPU.

What runs by a plan, and where one was there but could not be taken, is logged once. All ranks choose
alike: what a choice depends on is the same on all, and plans are compared before (`plugin.startup`).
"""

import logging
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.plans.executors.layout import Sizes
from fairseq_tutel.plans.executors.one_sided import OneSided
from fairseq_tutel.plans.executors.shared_memory import SharedMemoryError
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.format import REDUCING, Plan
from fairseq_tutel.plans.placed import PlacedPlan
from fairseq_tutel.ranks import world

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
SUMMED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int32, torch.int64),
}


class _InMemory:
    """A plan in shared memory where the group's ranks can have some, else by messages.

    A call runs when it is waited for: in shared memory it ends only when all ranks have come, and some may
    begin theirs in the middle of a backward in which others need them for something else first.
    """

    def __init__(self, name: str, plan: Plan, group: Group) -> None:
        self.name, self.plan, self.group = name, plan, group
        self.program: OneSided | TwoSided | None = None

    def start(self, own: Tensor, out: Tensor, sizes: Sizes) -> "_Later":
        return _Later(lambda: self._run(own, out, sizes))

    def _run(self, own: Tensor, out: Tensor, sizes: Sizes) -> None:
        if self.program is None:
            try:
                self.program = OneSided(self.plan, self.group)
                _say(f"the plan {self.name} runs in shared memory")
            except SharedMemoryError as error:
                self.program = TwoSided(self.plan, self.group)
                _say(f"the plan {self.name} runs by messages: {error}")
        self.program.start(own, out, sizes).wait()


class _Later:
    """What `_InMemory` has begun, as a `dist.Work` is."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run

    def is_completed(self) -> bool:
        return self.run is None

    def wait(self) -> None:
        if self.run is not None:
            self.run()
            self.run = None


Program = _InMemory | TwoSided


class _State:
    """The plans of this process."""

    plans: tuple[PlacedPlan, ...] = ()
    local = 0


# By group and digest, made at the first use.
_programs: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], Program]] = (
    WeakKeyDictionary()
)
_said: set[str] = set()


def use(plans: Sequence[PlacedPlan], local: int = 0) -> None:
    """Run collectives by these plans from now on; none of them: by torch.

    Args:
        plans: the same on all ranks; of several that fit, the first is taken.
        local: ranks of a host; 0 where nobody knows.
    """
    _State.plans, _State.local = tuple(plans), local
    _programs.clear()
    _said.clear()


def has(collective: str, group: Group) -> bool:
    """Whether some sizes of a collective run by a plan."""
    return bool(_State.plans) and bool(_fitting(collective, group))


def chosen(collective: str, own: Tensor, operation: str, group: Group) -> Program | None:
    """Return what runs a collective, None for torch.

    Args:
        collective: of `plans.format`.
        own: its `in`, contiguous.
        operation: as errors call it.
        group: the ranks.
    """
    if not _State.plans or not (plans := _fitting(collective, group)):
        return None
    num_bytes = own.numel() * own.itemsize
    if collective in REDUCING and own.dtype not in SUMMED:
        _say(f"{operation} runs by torch: a plan adds up no {own.dtype}")
        return None
    for placed in plans:
        least, most = placed.plan.min_bytes, placed.plan.max_bytes
        if least <= num_bytes and (most is None or num_bytes <= most):
            return _program(placed, own, operation, group)
    _say(f"{operation} runs by torch where no plan of {collective} is meant for its bytes")
    return None


def named(name: str, rows: Tensor, group: Group) -> Program:
    """Return what runs the all_to_all of a name, which `use` was given."""
    for placed in _fitting("all_to_all", group):
        if placed.name == name:
            return _program(placed, rows, "the exchange of rows", group)
    raise ValueError(
        f"a2a_algorithm (--moe-a2a-algorithm) is plan:{name}, but no plan of this name makes an all_to_all "
        f"of {dist.get_world_size(group)} ranks; give one to backend.use (--moe-collective-plans)."
    )


def _fitting(collective: str, group: Group) -> list[PlacedPlan]:
    ranks = range(world.size()) if group is None else dist.get_process_group_ranks(group)
    return [
        placed
        for placed in _State.plans
        if placed.plan.collective == collective and placed.fits(ranks, _State.local)
    ]


def _program(placed: PlacedPlan, own: Tensor, operation: str, group: Group) -> Program:
    plan, made = placed.plan, _programs.setdefault(group or _world(), {})
    key = plan.digest, own.is_cpu
    if key not in made:
        made[key] = _InMemory(placed.name, plan, group) if own.is_cpu else TwoSided(plan, group)
    _say(f"{operation} runs by the plan {placed.name} ({plan.ranks} ranks, digest {plan.digest})")
    return made[key]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _say(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        if world.is_first():
            logger.info(sentence)
