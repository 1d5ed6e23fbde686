"""Every kernel in plain torch: the specification, the CPU path and the oracle of the tests.

T tokens, D model_dim, K top_k, R rows. Index -1 means "nothing here" and reads as zero.
"""

import torch
from torch import Tensor


def gather_rows(x_TD: Tensor, index_R: Tensor, scale_R: Tensor | None = None) -> Tensor:
    """Return rows_RD with rows[r] = scale[r] * x[index[r]], or 0 where index[r] is -1.

    Args:
        x_TD: [T, D], any float dtype.
        index_R: [R] int64 in -1 .. T - 1.
        scale_R: [R] or None; entries where index is -1 are not read.
    """
    holes_R1 = _holes(index_R)
    rows_RD = _take(x_TD, index_R, holes_R1)
    if scale_R is not None:
        rows_RD.mul_(scale_R.unsqueeze(1).to(rows_RD.dtype))
    return rows_RD if holes_R1 is None else rows_RD.masked_fill_(holes_R1, 0.0)


def gather_sum(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return y_TD with y[t] = sum over j of weights[t, j] * rows[row_of[t, j]], -1 adding nothing.

    Args:
        rows_RD: [R, D], any float dtype.
        row_of_TK: [T, K] int64 in -1 .. R - 1.
        weights_TK: [T, K] in rows' dtype or wider, or None for ones.
    """
    num_tokens, top_k = row_of_TK.shape
    index_N = row_of_TK.reshape(-1)
    holes_N1 = _holes(index_N)
    copies_ND = _take(rows_RD, index_N, holes_N1)
    if holes_N1 is not None:
        copies_ND.masked_fill_(holes_N1, 0.0)
    if top_k == 1:
        return copies_ND if weights_TK is None else copies_ND.mul_(weights_TK.to(rows_RD.dtype))
    copies_TKD = copies_ND.view(num_tokens, top_k, rows_RD.shape[1])
    if weights_TK is None:
        return copies_TKD.sum(dim=1)
    # A batched 1 x K product: one pass, and half dtypes accumulate in fp32.
    return torch.bmm(weights_TK.to(rows_RD.dtype).unsqueeze(1), copies_TKD).squeeze(1)


def gather_dot(rows_RD: Tensor, row_of_TK: Tensor, y_TD: Tensor) -> Tensor:
    """Return dots_TK with dots[t, j] = <y[t], rows[row_of[t, j]]>, 0 where row_of is -1."""
    num_tokens, top_k = row_of_TK.shape
    index_N = row_of_TK.reshape(-1)
    holes_N1 = _holes(index_N)
    copies_ND = _take(rows_RD, index_N, holes_N1)
    if holes_N1 is not None:
        copies_ND.masked_fill_(holes_N1, 0.0)
    copies_TKD = copies_ND.view(num_tokens, top_k, rows_RD.shape[1])
    return torch.bmm(copies_TKD, y_TD.unsqueeze(2)).squeeze(2)


def _holes(index_N: Tensor) -> Tensor | None:
    """Return [N, 1] bool of the -1 entries, or None on CPU where there are none (no pass wasted)."""
    holes_N1 = (index_N < 0).unsqueeze(1)
    if index_N.device.type == "cpu" and not holes_N1.any():
        return None
    return holes_N1


def _take(x: Tensor, index_N: Tensor, holes_N1: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(index_N.shape[0], x.shape[1])
    return x.index_select(0, index_N if holes_N1 is None else index_N.clamp_min(0))
