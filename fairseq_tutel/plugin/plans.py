"""Reads and checks the collective plans of a run, and passes them to `parallel.collectives`."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.option import read
from fairseq_tutel.parallel import collectives, world
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.parallel.strategy import ALGORITHMS, PLAN
from fairseq_tutel.parallel.world import Work
from fairseq_tutel.plans.executors.backend import PlanBackend
from fairseq_tutel.plans.files import PlacedPlan, read_run, refuse_unused
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)

# Kept because a file may change after it was checked.
_read_once = functools.cache(read_run)


def plans_of(task_cfg: Any) -> tuple[PlacedPlan, ...]:
    """Return the collective plans of a run, read and checked; later calls use a cache."""
    path = read(TaskConfig, task_cfg).moe_collective_plans
    return _read_once(path) if path else ()


def check_together(task_cfg: Any) -> None:
    """Read and check the training run's collective plans on all ranks. Collective.

    Raises:
        ValueError: a plan cannot be read, or is invalid; all ranks raise the same error.
    """
    _read_once.cache_clear()
    operation = "the check of collective plans"
    if not any(world.all_gather_object(read(TaskConfig, task_cfg).moe_collective_plans, operation)):
        return
    checking = Work(lambda: plans_of(task_cfg))
    # Repeat short collectives, because a check of large plans may take longer than a collective's time-out.
    while True:
        ended, _, error = checking.look()
        if all(world.all_gather_object(ended, operation)):
            break
    for problem in world.all_gather_object(error, operation):
        if problem is not None:
            raise ValueError(problem)


def use_plans(task_cfg: Any, topology: Topology, config: MoEConfig) -> str:
    """Run collectives with the training run's collective plans, or with torch if there are none.

    A run with --moe-micro-batches may start on other numbers of ranks, so it skips plans that do not fit.

    Returns:
        The all-to-all algorithm: that of `config`, or linear if its plan was skipped.

    Raises:
        ValueError: no group can run a plan, or --moe-a2a-algorithm names a missing plan.
    """
    options = read(TaskConfig, task_cfg)
    plans, groups = plans_of(task_cfg) if topology.world_size > 1 else (), _groups(topology)
    local, is_elastic = options.moe_local_size or ranks_per_node(), options.moe_micro_batches > 0
    if is_elastic:
        plans = tuple(each for each in plans if any(each.fits(ranks) for ranks in groups))
    refuse_unused(plans, groups)
    algorithm, name = config.a2a_algorithm, config.a2a_algorithm.removeprefix(PLAN)
    size, known = (
        topology.expert_parallel_size,
        [each.name for each in _all_to_alls(plans, topology)],
    )
    if name != algorithm and size > 1 and name not in known:
        if not is_elastic:
            fix = f"give {' or '.join(PLAN + each for each in known)}" if known else "add that plan"
            raise ValueError(
                f"--moe-a2a-algorithm is {PLAN}{name}, but --moe-collective-plans has no {name}.json with "
                f"an all_to_all for the {size} ranks of an EP group; {fix}, or give linear."
            )
        logger.warning("no plan %s fits the %d ranks of an EP group: using %s", name, size, ALGORITHMS[0])
        algorithm = ALGORITHMS[0]
    collectives.use(PlanBackend(plans, local) if plans else None)
    return algorithm


def tuned_algorithms(layer: MoELayer, task_cfg: Any) -> tuple[str, ...]:
    """Return the all-to-all algorithms that a tuner tries: linear, 2dh and the plans of the EP group."""
    topology = layer.topology
    names = ALGORITHMS if topology.grid is not None else ALGORITHMS[:1]
    return (*names, *(PLAN + each.name for each in _all_to_alls(plans_of(task_cfg), topology)))


def _all_to_alls(plans: Sequence[PlacedPlan], topology: Topology) -> list[PlacedPlan]:
    if topology.expert_group is None:
        return []
    ranks = dist.get_process_group_ranks(topology.expert_group)
    return [each for each in plans if each.plan.collective == "all_to_all" and each.fits(ranks)]


def _groups(topology: Topology) -> list[Sequence[int]]:
    """Return the member ranks of every process group that contains this rank."""
    made = (topology.expert_group, topology.replica_group, *topology.share_groups.values())
    groups = [dist.get_process_group_ranks(group) for group in made if group is not None]
    return [range(topology.world_size), *groups] if topology.world_size > 1 else []
