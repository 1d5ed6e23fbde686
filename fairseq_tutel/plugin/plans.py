"""Reads and checks the collective plans of a run, and passes them to `parallel.collectives`."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.option_table import TaskConfig
from fairseq_tutel.option import read
from fairseq_tutel.parallel import collectives, world
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.links import exchange_seconds, plan_seconds
from fairseq_tutel.parallel.machine import Machine
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.parallel.strategy import ALGORITHMS, PLAN
from fairseq_tutel.parallel.tuner import HOPELESS
from fairseq_tutel.parallel.world import Work
from fairseq_tutel.plans.executors.backend import PlanBackend
from fairseq_tutel.plans.files import PlacedPlan, read_run, refuse_unused
from fairseq_tutel.plugin.run_state import RUN

logger = logging.getLogger(__name__)


def plans_of(task_cfg: Any) -> tuple[PlacedPlan, ...]:
    """Return the collective plans of a run, read and checked; later calls use a cache."""
    path = read(TaskConfig, task_cfg).moe_collective_plans
    if path and path not in RUN.plans:
        RUN.plans[path] = read_run(path)
    return RUN.plans[path] if path else ()


def check_together(task_cfg: Any) -> None:
    """Read and check the training run's collective plans on all ranks. Collective.

    Raises:
        ValueError: a plan cannot be read, or is invalid; all ranks raise the same error.
    """
    RUN.plans.clear()
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
    plans = plans_of(task_cfg) if topology.world_size > 1 else ()
    local, is_elastic = options.moe_local_size or ranks_per_node(), options.moe_micro_batches > 0
    if is_elastic:
        plans = _fitting(plans, _groups(topology), local)
    refuse_unused(plans, _groups(topology), local)
    algorithm, name = config.a2a_algorithm, config.a2a_algorithm.removeprefix(PLAN)
    size = topology.expert_parallel_size
    known = [each.name for each in _all_to_alls(plans, topology, local)]
    is_missing = name != algorithm and size > 1 and name not in known
    if is_missing and is_elastic:
        algorithm = ALGORITHMS[0]
        text = "--moe-a2a-algorithm is %s%s, but no such plan fits the %d ranks of an EP group: using %s"
        logger.warning(text, PLAN, name, size, algorithm)
    elif is_missing:
        fix = f"give {' or '.join(PLAN + each for each in known)}" if known else "add that plan"
        raise ValueError(
            f"--moe-a2a-algorithm is {PLAN}{name}, but --moe-collective-plans has no {name}.json with an "
            f"all_to_all for the {size} ranks of an EP group; {fix}, or give linear."
        )
    if known and name not in known and config.adaptive != "auto" and config.adaptive_r != 0:
        flags = " or ".join(PLAN + each for each in known)
        logger.info(
            "no collective plan is used to exchange rows; to use one, give --moe-a2a-algorithm %s", flags
        )
    collectives.use(PlanBackend(plans, local) if plans else None)
    return algorithm


def _fitting(
    plans: Sequence[PlacedPlan], groups: Sequence[Sequence[int]], local: int
) -> tuple[PlacedPlan, ...]:
    """Return the plans that a group of ranks can run, and log the names of the others."""
    fitting = tuple(each for each in plans if any(each.fits(ranks, local) for ranks in groups))
    if len(fitting) < len(plans):
        others = ", ".join(each.name for each in plans if each not in fitting)
        logger.info("collective plans that fit no group of ranks are not used: %s", others)
    return fitting


def tuned_algorithms(layer: MoELayer, task_cfg: Any, machine: Machine, num_bytes: float) -> tuple[str, ...]:
    """Return the all-to-all algorithms that a tuner tries: linear, 2dh and plans with good predicted times.

    `num_bytes` is the size of a rank's rows in the first MoE layer.
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
        text = "adaptive: plans with slow times, predicted from the hardware profile %s, are not tried: %s"
        logger.info(text, machine.name, slow)
    return tuple(kept)


def _all_to_alls(plans: Sequence[PlacedPlan], topology: Topology, local: int) -> list[PlacedPlan]:
    if topology.expert_group is None:
        return []
    ranks = dist.get_process_group_ranks(topology.expert_group)
    return [each for each in plans if each.plan.collective == "all_to_all" and each.fits(ranks, local)]


def _groups(topology: Topology) -> list[Sequence[int]]:
    """Return the member ranks of every process group that contains this rank."""
    made = (topology.expert_group, topology.replica_group, *topology.share_groups.values())
    groups = [dist.get_process_group_ranks(group) for group in made if group is not None]
    return [range(topology.world_size), *groups] if topology.world_size > 1 else []
