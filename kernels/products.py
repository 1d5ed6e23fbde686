"""Products of an expert's rows with its weights on a CPU, each in the quickest arrangement for its rows.

Where rows are few, time is memory's: a weight is read, or its gradient written, and the arrangement decides
how fast. By MKL 2024.2 on a core of an AMD EPYC (AVX-512, 1 MiB of its own cache), weights [2048, 512] in
fp32. n rows, I and O what a linear map reads and gives.
"""

import torch
from torch import Tensor

from fairseq_tutel.kernels.few_rows import are_few, linear_of_few

# Below, weights are in the core's own cache, and what is plain is quickest.
LEAST_BYTES = 2**20
# A gradient is cleared and then added to, as much at a time as the cache holds: 0.47 ms beside 0.85 for 8
# rows, 0.94 beside 1.13 for 32; from there all at once, 1.65 beside 1.87 for 64, 2.99 beside 3.16 for 128.
MOST_IN_PARTS, PART_BYTES, MOST_CLEARED = 32, 2**20, 128


def linear(
    rows_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_nO: Tensor | None = None
) -> Tensor:
    """Return rows @ weight.T + bias, written into `out_nO` where that is given."""
    if out_nO is None:  # made here, so that the same product gives the same bits, kept or not
        out_nO = rows_nI.new_empty(len(rows_nI), len(weight_OI))
    if are_few(rows_nI) and weight_OI.numel() * weight_OI.itemsize >= LEAST_BYTES:
        return out_nO.copy_(linear_of_few(rows_nI, weight_OI, bias_O))
    if bias_O is None:
        return torch.mm(rows_nI, weight_OI.t(), out=out_nO)
    return torch.addmm(bias_O, rows_nI, weight_OI.t(), out=out_nO)


def weight_grad(
    dout_nO: Tensor, rows_nI: Tensor, dweight_OI: Tensor, dbias_O: Tensor | None
) -> None:
    """Write dout.T @ rows, and the sum of dout's rows where there is a bias; what was there is not read."""
    is_float = dout_nO.dtype == torch.float32
    if is_float and 1 < len(rows_nI) <= MOST_CLEARED:
        # The bits of one product.
        _cleared_and_added(dout_nO, rows_nI, dweight_OI)
    else:
        torch.mm(dout_nO.t(), rows_nI, out=dweight_OI)
    if dbias_O is None:
        return
    if is_float or dout_nO.dtype == torch.float64:
        # A product with ones takes a third of the time of a sum over dimension 0.
        torch.mv(dout_nO.t(), dout_nO.new_ones(len(dout_nO)), out=dbias_O)
    else:
        torch.sum(dout_nO, dim=0, out=dbias_O)


def _cleared_and_added(dout_nO: Tensor, rows_nI: Tensor, dweight_OI: Tensor) -> None:
    out_dim, in_dim = dweight_OI.shape
    step = out_dim
    # Every part begins and ends with all threads waiting for each other.
    if len(rows_nI) <= MOST_IN_PARTS and torch.get_num_threads() == 1:
        step = max(1, PART_BYTES // (in_dim * dweight_OI.itemsize))
    if step >= out_dim:
        dweight_OI.zero_().addmm_(dout_nO.t(), rows_nI)
        return
    for dpart_pI, dout_pn in zip(dweight_OI.split(step), dout_nO.t().split(step), strict=True):
        dpart_pI.zero_().addmm_(dout_pn, rows_nI)
