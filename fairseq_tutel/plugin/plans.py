"""Reads and checks the collective plans of a run, and passes them to `parallel.collectives`."""

import functools
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
from fairseq_tutel.plans.executors.backend import PlanBackend
from fairseq_tutel.plans.files import PlacedPlan, read_run, refuse_unused
from fairseq_tutel.plugin.training.options import TaskConfig

# The checked plans are cached, because a plan file may change after the check.
_read_once = functools.cache(read_run)


def plans_of(task_cfg: Any) -> tuple[PlacedPlan, ...]:
    """Return the collective plans of a run after checking them; later calls use a cache."""
    path = read(TaskConfig, task_cfg).moe_collective_plans
    return _read_once(path) if path else ()


def check_together(task_cfg: Any) -> None:
    """Read and check the training run's collective plans on all ranks. Collective.

    Raises:
        ValueError: a plan cannot be read, or is invalid; all ranks raise the same error.
    """
    _read_once.cache_clear()
    error = ""
    try:
        plans_of(task_cfg)
    except ValueError as problem:
        error = str(problem)
    for text in filter(None, world.all_gather_object(error, "the check of collective plans")):
        raise ValueError(text)


def use_plans(task_cfg: Any, topology: Topology, config: MoEConfig) -> None:
    """Run collectives with the training run's collective plans, or with torch if the run has none.

    Raises:
        ValueError: a plan fits no process group, or --moe-collective-plans lacks the --moe-a2a-algorithm.
    """
    plans, groups = plans_of(task_cfg) if topology.world_size > 1 else (), _groups(topology)
    refuse_unused(plans, groups)
    name, size = config.a2a_algorithm.removeprefix(PLAN), topology.expert_parallel_size
    known = [each.name for each in _all_to_alls(plans, topology)]
    if name != config.a2a_algorithm and size > 1 and name not in known:
        fix = f"give {' or '.join(PLAN + each for each in known)}" if known else "add that plan"
        raise ValueError(
            f"--moe-a2a-algorithm is {PLAN}{name}, but --moe-collective-plans has no {name}.json with an "
            f"all_to_all for the {size} ranks of an EP group; {fix}, or give linear."
        )
    local = read(TaskConfig, task_cfg).moe_local_size or ranks_per_node()
    collectives.use(PlanBackend(plans, local) if plans else None)


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
