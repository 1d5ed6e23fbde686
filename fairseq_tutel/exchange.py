"""Exchange: rows cross to the ranks that own their experts, the experts run, and the rows come back.

R rows, D model_dim, E experts (e local), P ranks of the expert group, C capacity. `expert_fn(rows,
counts)` is a callable, so this file knows no experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_tutel.comm.all_to_all import ExchangeTimer, all_to_all

ExpertFn = Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """How rows travel: within `group` (None: they stay), ragged or padded, timed or not."""

    group: dist.ProcessGroup | None = None
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
    return run_across(rows_RD, counts_E, expert_fn, plan.group, plan.timer)


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
    timer: ExchangeTimer | None,
) -> Tensor:
    num_ranks = dist.get_world_size(group)
    num_local, model_dim = counts_E.shape[0] // num_ranks, rows_RD.shape[1]
    even = [rows_RD.shape[0] // num_ranks] * num_ranks
    received = all_to_all(rows_RD, even, even, group, timer)
    by_source = received.view(num_ranks, num_local, -1, model_dim)  # [P, e, C, D]
    by_expert = by_source.transpose(0, 1).reshape(received.shape)  # [e * P * C, D]
    done = expert_fn(by_expert, [received.shape[0] // num_local] * num_local)
    back = done.view(num_local, num_ranks, -1, model_dim).transpose(0, 1).reshape(received.shape)
    return all_to_all(back, even, even, group, timer)


def _run_ragged(
    rows_RD: Tensor,
    counts_E: Tensor,
    expert_fn: ExpertFn,
    group: dist.ProcessGroup,
    timer: ExchangeTimer | None,
) -> Tensor:
    num_ranks = dist.get_world_size(group)
    counts_PE = counts_E.view(num_ranks, -1)  # [P, e], what goes to each rank
    arriving_PE = torch.empty_like(counts_PE)
    dist.all_to_all_single(arriving_PE, counts_PE.contiguous(), group=group)
    both = torch.stack([counts_PE, arriving_PE]).tolist()  # the one host read of this forward
    send = [sum(row) for row in both[0]]
    receive = [sum(row) for row in both[1]]
    received = all_to_all(rows_RD[: sum(send)], send, receive, group, timer)
    to_expert, to_source = regroup_maps(arriving_PE, sum(receive))
    by_expert = _permute(received, to_expert, to_source)
    done = expert_fn(by_expert, [sum(column) for column in zip(*both[1], strict=True)])
    back = _permute(done, to_source, to_expert)
    return all_to_all(back, receive, send, group, timer)


def regroup_maps(counts_PE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the maps between source-major rows (rank, expert) and expert-major rows (expert, rank).

    Args:
        counts_PE: [P, e] int64, rows from each rank for each local expert.
        num_rows: their sum, on the host.

    Returns:
        to_expert: [R] int64, expert-major row r is source-major row to_expert[r].
        to_source: [R] int64, the inverse.
    """
    starts_PE = _starts(counts_PE)
    starts_EP = _starts(counts_PE.t())
    to_expert = _spread(starts_PE.t() - starts_EP, counts_PE.t(), num_rows)
    to_source = _spread(starts_EP.t() - starts_PE, counts_PE, num_rows)
    return to_expert, to_source


def _starts(counts: Tensor) -> Tensor:
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def _spread(shifts: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    shift_R = torch.repeat_interleave(shifts.reshape(-1), counts.reshape(-1), output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shift_R


def _permute(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    return _Permute.apply(rows_RD, index_R, inverse_R)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_RD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return drows_RD.index_select(0, inverse_R), None, None
