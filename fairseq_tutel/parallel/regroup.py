"""Functions that reorder blocks of rows in one gather, repeat rows, and sum the copies of a row.

Shapes use R for rows, D for model_dim, E for experts (e of them local), P for ranks and M for copies of a
row. An expert has s shards, and r ranks receive each row. A block of rows has two indices a and b, such as
its source rank and its expert. counts_AB[a, b] is the number of rows in the block.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order


def regroup_maps(counts_AB: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return two index maps [R]: one sorts blocks of rows by b, then a, and one restores their order.

    The input rows are sorted by a, then b. Row i of the sorted result is row to_b_major[i] of the input.
    `num_rows` is R, so that the host need not wait for `counts_AB`.
    """
    starts_AB = _block_starts(counts_AB)
    starts_BA = _block_starts(counts_AB.t())
    rows_R = torch.arange(num_rows, device=counts_AB.device)
    to_b_major = rows_R + _spread(starts_AB.t() - starts_BA, counts_AB.t(), num_rows)
    to_a_major = rows_R + _spread(starts_BA.t() - starts_AB, counts_AB, num_rows)
    return to_b_major, to_a_major


def permute(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return rows_RD[index_R]. The backward pass gathers gradients by the inverse permutation."""
    return gather(rows_RD, index_R, inverse_R.unsqueeze(0))


def gather(rows_RD: Tensor, index_X: Tensor, copies_MR: Tensor) -> Tensor:
    """Return rows_RD[index_X], of shape [X, D]. The backward pass sums the gradients of each row's copies.

    The result has the copies of row i at the positions copies_MR[:, i].
    """
    return _Copies.apply(rows_RD, index_X, copies_MR, False)


def sum_of_copies(rows_XD: Tensor, copies_MR: Tensor) -> Tensor:
    """Return the sum of each row's copies [R, D], without autograd.

    Copy m of row i is rows_XD[copies_MR[m, i]]. Copies are added in the order of m.
    """
    out = rows_XD.index_select(0, copies_MR[0])
    for copy_R in copies_MR[1:]:
        out += rows_XD.index_select(0, copy_R)
    return out


def _block_starts(counts: Tensor) -> Tensor:
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def _spread(values: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """Return the value of each row's block [R], without a host synchronization."""
    return torch.repeat_interleave(values.reshape(-1), counts.reshape(-1), output_size=num_rows)


class _Copies(torch.autograd.Function):
    """Copies rows or, with `sums`, adds each row's copies. Each operation is the other's backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index_X: Tensor, copies_MR: Tensor, sums: bool) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(index_X if sums else copies_MR)
        return sum_of_copies(rows, copies_MR) if sums else rows.index_select(0, index_X)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        drows = drows.index_select(0, saved) if ctx.sums else sum_of_copies(drows, saved)
        return drows, None, None, None


def chunk_of(count: Tensor, index: int, number: int) -> Tensor:
    """Return the length of chunk `index` if `count` rows are split into `number` almost equal chunks."""
    return count * (index + 1) // number - count * index // number


def destinations(counts_E: Tensor, slices: int, degree: int) -> Tensor:
    """Return the number of rows to send to each expert of each rank [P * e, 1], in the order of ranks.

    With s > 1 shards, ranks are in the order of (expert, copy m, part j). An expert's rows are split into
    s / r parts, and rank (expert, m, j) gets part j. The r ranks that differ only in m get the same rows.
    """
    if slices == 1:
        return counts_E.unsqueeze(1)
    parts = slices // degree
    part_EJ = torch.stack([chunk_of(counts_E, j, parts) for j in range(parts)], 1)
    return part_EJ.unsqueeze(1).expand(-1, degree, -1).reshape(-1, 1)


def repeat_blocks(counts_E: Tensor, num_rows: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return index maps that repeat each expert's block of rows r = `degree` times.

    The first map has the row of each copy [r * R]. The second map has the positions of a row's copies
    [r, R].
    """
    counts_ER = counts_E.unsqueeze(1).expand(-1, degree)
    shift_ER = _block_starts(counts_ER) - _block_starts(counts_E).unsqueeze(1)
    rows_R = torch.arange(num_rows, device=counts_E.device)
    copies_MR = torch.stack([rows_R + _spread(s, counts_E, num_rows) for s in shift_ER.unbind(1)])
    every_X = torch.arange(num_rows * degree, device=counts_E.device)
    return every_X - _spread(shift_ER, counts_ER, num_rows * degree), copies_MR


def sum_copies(rows_XD: Tensor, source_X: Tensor, copies_MR: Tensor) -> Tensor:
    """Return the sum of each row's copies [R, D]. The backward pass repeats each row's gradient."""
    return _Copies.apply(rows_XD, source_X, copies_MR, True)
