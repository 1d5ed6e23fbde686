"""Regroup: from blocks in the order (a, b) to blocks in the order (b, a), as one gather, and back.

R rows, D model_dim; counts_AB[a, b] rows are in block (a, b).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def regroup_maps(counts_AB: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the maps between a-major and b-major rows.

    Args:
        counts_AB: [A, B] int64, rows of each block.
        num_rows: their sum, on the host.

    Returns:
        to_b_major: [R] int64, b-major row r is a-major row to_b_major[r].
        to_a_major: [R] int64, the inverse.
    """
    starts_AB = _starts(counts_AB)
    starts_BA = _starts(counts_AB.t())
    to_b_major = _spread(starts_AB.t() - starts_BA, counts_AB.t(), num_rows)
    to_a_major = _spread(starts_BA.t() - starts_AB, counts_AB, num_rows)
    return to_b_major, to_a_major


def permute(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return rows[index]; the backward is the gather by the inverse."""
    return _Permute.apply(rows_RD, index_R, inverse_R)


def _starts(counts: Tensor) -> Tensor:
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def _spread(shifts: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    shift_R = torch.repeat_interleave(shifts.reshape(-1), counts.reshape(-1), output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shift_R


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
