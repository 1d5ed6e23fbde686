"""Copies: a row that goes to r ranks of its expert, and the sum of what comes back.

R rows, D model_dim, E experts (e of a rank), P ranks, s slices of an expert, r ranks that get a row.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.comm.regroup import block_starts, gather, spread, sum_of_copies
from fairseq_tutel.comm.trip import chunk_of
from fairseq_tutel.kernels.first_order import first_order


def destinations(counts_E: Tensor, slices: int, degree: int) -> Tensor:
    """Return [P, e]: how many rows go to each expert of each rank.

    Rank (expert, m, j) gets part j of s / r of the expert's rows, the same for every m of r.
    """
    if slices == 1:
        return counts_E.unsqueeze(1)
    parts = slices // degree
    part_EJ = torch.stack([chunk_of(counts_E, j, parts) for j in range(parts)], 1)
    return part_EJ.unsqueeze(1).expand(-1, degree, -1).reshape(-1, 1)


def repeat_blocks(rows_RD: Tensor, counts_E: Tensor, num_rows: int, degree: int) -> "Repeated":
    """Repeat the rows of every expert r times, block by block.

    Args:
        rows_RD: [R, D] expert-major.
        counts_E: [E] rows of each expert, R in all.
        num_rows: R, on the host.
        degree: r.
    """
    counts_ER = counts_E.unsqueeze(1).expand(-1, degree)
    # Where copy m of a row is, and which row a copy is of.
    shift_ER = block_starts(counts_ER) - block_starts(counts_E).unsqueeze(1)
    rows_R = torch.arange(num_rows, device=rows_RD.device)
    copies_MR = torch.stack([rows_R + spread(s, counts_E, num_rows) for s in shift_ER.unbind(1)])
    every = torch.arange(num_rows * degree, device=rows_RD.device)
    source_R = every - spread(shift_ER, counts_ER, num_rows * degree)
    return Repeated(gather(rows_RD, source_R, copies_MR), source_R, copies_MR)


class Repeated:
    """Rows that stand r times each, and how to sum what becomes of them."""

    def __init__(self, rows_RD: Tensor, source_R: Tensor, copies_MR: Tensor) -> None:
        self.rows_RD, self.source_R, self.copies_MR = rows_RD, source_R, copies_MR

    def summed(self, done_RD: Tensor) -> Tensor:
        """Return the sum over the copies of every row, in the order of m."""
        return _Sum.apply(done_RD, self.source_R, self.copies_MR)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source_R: Tensor, copies_MR: Tensor) -> Tensor:
        ctx.save_for_backward(source_R)
        return sum_of_copies(rows, copies_MR)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (source_R,) = ctx.saved_tensors
        return drows.index_select(0, source_R), None, None
