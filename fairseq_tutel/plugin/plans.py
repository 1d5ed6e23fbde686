"""Plans of a training's collectives: read, refused where they do not fit, told to who runs them."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fairseq_tutel.comm import collectives
from fairseq_tutel.moe.config import MoEConfig, TaskConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.options import read
from fairseq_tutel.planning.links import exchange_seconds, plan_seconds
from fairseq_tutel.planning.machine import Machine
from fairseq_tutel.planning.strategy import ALGORITHMS, PLAN
from fairseq_tutel.planning.tuner import HOPELESS
from fairseq_tutel.plans import placed
from fairseq_tutel.plans.executors.backend import PlanBackend
from fairseq_tutel.plans.placed import PlacedPlan
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.ranks.rendezvous import ranks_per_node
from fairseq_tutel.ranks.world import Work

logger = logging.getLogger(__name__)


class _State:
    """Digests of the plans that this host's first rank has checked for this one."""

    proved: frozenset[str] = frozenset()


def plans_of(task_cfg: Any) -> tuple[PlacedPlan, ...]:
    """Return the plans that a training is given.

    Raises:
        ValueError: one cannot be read, or is not right.
    """
    path = read(TaskConfig, task_cfg).moe_collective_plans
    return placed.read(path, _State.proved) if path else ()


def prove_once_a_host(task_cfg: Any) -> None:
    """Check the plans on the first rank of each host; its other ranks trust plans of the same digest.

    Collective. Afterwards `plans_of` returns the plans on every rank.

    Raises:
        ValueError: a plan cannot be read, or is not right; the same on all ranks.
    """
    _State.proved = frozenset()
    given = read(TaskConfig, task_cfg)
    paths = world.told_by_all(given.moe_collective_plans, "the check of collective plans")
    if not any(paths):
        return
    local, rank = given.moe_local_size or ranks_per_node() or 1, dist.get_rank()
    operation = "the check of collective plans"
    is_first = rank % local == 0
    checking = Work(
        lambda: (
            frozenset(each.plan.digest for each in plans_of(task_cfg)) if is_first else frozenset()
        )
    )
    # A look at a time: plans of many ranks take longer than ranks wait for each other.
    while True:
        ended, digests, error = checking.look()
        if all(world.told_by_all(ended, operation)):
            break
    problem = str(error) if error is not None else ""
    told = world.told_by_all((problem, digests), "the check of collective plans")
    if problem := next((each for each, _ in told if each), ""):
        raise ValueError(problem)
    if rank % local:
        _State.proved = told[rank - rank % local][1]


def use_plans(task_cfg: Any, topology: Topology, config: MoEConfig) -> None:
    """Let collectives run by a training's plans, or by none.

    Args:
        task_cfg: of the task.
        topology: of this rank.
        config: of the first MoE layer.

    Raises:
        ValueError: a plan that no group can run, or an --moe-a2a-algorithm without its plan.
    """
    plans = plans_of(task_cfg) if topology.world_size > 1 else ()
    local = read(TaskConfig, task_cfg).moe_local_size or ranks_per_node()
    placed.refuse_unused(plans, _groups(topology), local)
    name = config.a2a_algorithm.removeprefix(PLAN)
    size = topology.expert_parallel_size
    known = [each.name for each in _all_to_alls(plans, topology, local)]
    if name != config.a2a_algorithm and size > 1 and name not in known:
        fix = f"give {' or '.join(PLAN + each for each in known)}" if known else "give it that plan"
        raise ValueError(
            f"--moe-a2a-algorithm is {PLAN}{name}, but --moe-collective-plans has no {name}.json with an "
            f"all_to_all of the {size} ranks that share experts; {fix}, or linear."
        )
    elif known and name not in known and config.adaptive != "auto" and config.adaptive_r != 0:
        asking = " or ".join(PLAN + each for each in known)
        logger.info("the exchange of rows runs by no plan; --moe-a2a-algorithm %s lets it", asking)
    collectives.use(PlanBackend(plans, local) if plans else None)


def tuned_algorithms(
    layer: MoELayer, task_cfg: Any, machine: Machine, num_bytes: float
) -> tuple[str, ...]:
    """Return the all-to-alls among which a tuner chooses: the plans that are not expected to be slow, too.

    Args:
        layer: the first.
        task_cfg: of the task.
        machine: whose links foretell a plan's time.
        num_bytes: of a rank's rows.
    """
    topology = layer.topology
    grid, size = topology.grid, topology.expert_parallel_size
    nodes, local = (1, size) if grid is None else (grid.nodes, grid.local)
    names = ALGORITHMS if grid is not None else ALGORITHMS[:1]
    seconds = {name: exchange_seconds(num_bytes, machine, nodes, local, name) for name in names}
    given = read(TaskConfig, task_cfg).moe_local_size or ranks_per_node()
    for each in _all_to_alls(plans_of(task_cfg), topology, given):
        seconds[PLAN + each.name] = plan_seconds(each.report.loads, num_bytes, machine, local)
    limit = HOPELESS * min(seconds.values())
    kept = [name for name in seconds if name in ALGORITHMS or seconds[name] <= limit]
    if len(kept) < len(seconds):
        slow = ", ".join(name for name in seconds if name not in kept)
        logger.info(
            "adaptive: not tried, since the numbers of %s foretell it: %s", machine.name, slow
        )
    return tuple(kept)


def _all_to_alls(plans: Sequence[PlacedPlan], topology: Topology, local: int) -> list[PlacedPlan]:
    if topology.expert_group is None:
        return []
    ranks = dist.get_process_group_ranks(topology.expert_group)
    return [
        each for each in plans if each.plan.collective == "all_to_all" and each.fits(ranks, local)
    ]


def _groups(topology: Topology) -> list[Sequence[int]]:
    """Return the ranks of every group of this rank's."""
    made = (topology.expert_group, topology.replica_group, *topology.share_groups.values())
    groups = [dist.get_process_group_ranks(group) for group in made if group is not None]
    return [range(topology.world_size), *groups] if topology.world_size > 1 else []
