"""Exchange: rows cross to the ranks that own their experts, the experts run, and the rows come back.

R rows, D model_dim, E experts (e local), P ranks of the expert group, C capacity. `expert_fn(rows,
counts)` is a callable, so this file knows no experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.comm import all_to_all, hierarchical
from fairseq_tutel.comm.all_to_all import ExchangeTimer, LinearTrip
from fairseq_tutel.comm.hierarchical import HierarchicalTrip
from fairseq_tutel.comm.regroup import permute, regroup_maps
from fairseq_tutel.comm.topology import Grid

ExpertFn = Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """How rows travel: within `group` (None: they stay), over its nodes where `grid` has them.

    Ragged or padded, timed or not.
    """

    group: dist.ProcessGroup | None = None
    grid: Grid | None = None
    padded: bool = False
    timer: ExchangeTimer | None = None


def run(rows_RD: Tensor, counts_E: Tensor, expert_fn: ExpertFn, plan: ExchangePlan) -> Tensor:
    """Send, regroup by expert, apply `expert_fn`, regroup back, return.

    Args:
        rows_RD: [R, D] expert-major rows: compact, or E * C for a padded plan.
        counts_E: [E] int64, kept rows of each expert.
        expert_fn: maps rows of the local experts, expert-major, with host counts.
        plan: see ExchangePlan.

    Returns:
        [R', D] in the order of the input; compact rows without their unused tail.
    """
    if plan.group is None:
        return _run_local(rows_RD, counts_E, expert_fn)
    run_across = _run_padded if plan.padded else _run_ragged
    return run_across(rows_RD, counts_E, expert_fn, plan.group, plan)


def agreed_capacity(counts_E: Tensor, plan: ExchangePlan) -> int:
    """Return the places per expert that suffice on every rank: the largest count, at least 1.

    One small all-reduce, and the one host read of a padded forward.
    """
    need = counts_E.max().clamp_min(1)
    dist.all_reduce(need, op=dist.ReduceOp.MAX, group=plan.group)
    return int(need)


def _run_local(rows_RD: Tensor, counts_E: Tensor, expert_fn: ExpertFn) -> Tensor:
    counts = counts_E.tolist()
    return expert_fn(rows_RD[: sum(counts)], counts)


def _run_padded(
    rows_RD: Tensor,
    counts_E: Tensor,
    expert_fn: ExpertFn,
    group: dist.ProcessGroup,
    plan: ExchangePlan,
) -> Tensor:
    num_ranks = dist.get_world_size(group)
    num_local, model_dim = counts_E.shape[0] // num_ranks, rows_RD.shape[1]
    trip: LinearTrip | HierarchicalTrip
    rows_per_rank = rows_RD.shape[0] // num_ranks
    if plan.grid is None:
        even = (rows_per_rank,) * num_ranks
        trip = LinearTrip(group=group, send=even, receive=even, timer=plan.timer)
    else:
        trip = hierarchical.even_trip(rows_per_rank, plan.grid, rows_RD.device, plan.timer)
    received = trip.there(rows_RD)
    by_source = received.view(num_ranks, num_local, -1, model_dim)  # [P, e, C, D]
    by_expert = by_source.transpose(0, 1).reshape(received.shape)  # [e * P * C, D]
    done = expert_fn(by_expert, [received.shape[0] // num_local] * num_local)
    back = done.view(num_local, num_ranks, -1, model_dim).transpose(0, 1).reshape(received.shape)
    return trip.back(back)


def _run_ragged(
    rows_RD: Tensor,
    counts_E: Tensor,
    expert_fn: ExpertFn,
    group: dist.ProcessGroup,
    plan: ExchangePlan,
) -> Tensor:
    counts_PE = counts_E.view(dist.get_world_size(group), -1)  # [P, e], what goes to each rank
    trip: LinearTrip | HierarchicalTrip
    if plan.grid is None:
        trip, arriving_PE, arriving = all_to_all.open_trip(counts_PE, group, plan.timer)
    else:
        trip, arriving_PE, arriving = hierarchical.open_trip(counts_PE, plan.grid, plan.timer)
    per_expert = [sum(column) for column in zip(*arriving, strict=True)]
    received = trip.there(rows_RD[: trip.num_sent])
    to_expert, to_source = regroup_maps(arriving_PE, sum(per_expert))
    by_expert = permute(received, to_expert, to_source)
    done = expert_fn(by_expert, per_expert)
    return trip.back(permute(done, to_source, to_expert))
