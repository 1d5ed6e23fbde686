"""Matrix products of an expert on a CPU, in the form that is fastest for the number of rows.

With few rows, reading the weight or writing its gradient limits the speed. The form of the product
determines how much of the memory bandwidth is used. All times here are for MKL 2024.2 on one core of an AMD
EPYC (AVX-512, 1 MiB L2 cache) and fp32 weights [2048, 512]. Shapes use n for rows, and I and O for the
input and output dimensions of a linear map.
"""

import torch
from torch import Tensor

from fairseq_tutel.kernels.few_rows import are_few, linear_of_few
from fairseq_tutel.kernels.quantized import QuantizedMatrix

# For a weight with fewer bytes, which fits into the cache, rows @ weight.T is faster than weight @ rows.T.
LEAST_BYTES = 2**20
# Up to 128 rows, clearing a weight gradient and adding a product to it is faster than writing the product:
# 1.65 instead of 1.87 ms for 64 rows. Up to 32 rows, clearing and adding is even faster in parts that fit
# into the cache: 0.47 instead of 0.85 ms for 8 rows, and 0.94 instead of 1.13 ms for 32 rows.
MOST_IN_PARTS, PART_BYTES, MOST_CLEARED = 32, 2**20, 128


def linear(
    rows_nI: Tensor,
    weight_OI: Tensor | QuantizedMatrix,
    bias_O: Tensor | None,
    out_nO: Tensor | None = None,
) -> Tensor:
    """Compute a linear map rows @ weight.T + bias, into `out_nO` if given, and return the result."""
    if isinstance(weight_OI, QuantizedMatrix):
        y_nO = weight_OI.linear(rows_nI, bias_O)
        return y_nO if out_nO is None else out_nO.copy_(y_nO)
    if out_nO is None:  # A product with `out=` may differ in bits from a product without it.
        out_nO = rows_nI.new_empty(len(rows_nI), len(weight_OI))
    if are_few(rows_nI) and weight_OI.numel() * weight_OI.itemsize >= LEAST_BYTES:
        return out_nO.copy_(linear_of_few(rows_nI, weight_OI, bias_O))
    if bias_O is None:
        return torch.mm(rows_nI, weight_OI.t(), out=out_nO)
    return torch.addmm(bias_O, rows_nI, weight_OI.t(), out=out_nO)


def weight_grad(dout_nO: Tensor, rows_nI: Tensor, dweight_OI: Tensor, dbias_O: Tensor | None) -> None:
    """Write a linear map's gradients to dweight (dout.T @ rows) and, if given, to dbias (sum of dout)."""
    is_float = dout_nO.dtype == torch.float32
    if is_float and 1 < len(rows_nI) <= MOST_CLEARED:
        # With more than two rows, the gradient is bit-identical to that of a single product.
        _cleared_and_added(dout_nO, rows_nI, dweight_OI)
    else:
        torch.mm(dout_nO.t(), rows_nI, out=dweight_OI)
    if dbias_O is None:
        return
    if is_float or dout_nO.dtype == torch.float64:
        # A matrix product with ones is three times faster than a sum over dimension 0.
        torch.mv(dout_nO.t(), dout_nO.new_ones(len(dout_nO)), out=dbias_O)
    else:
        torch.sum(dout_nO, dim=0, out=dbias_O)


def _cleared_and_added(dout_nO: Tensor, rows_nI: Tensor, dweight_OI: Tensor) -> None:
    out_dim, in_dim = dweight_OI.shape
    if len(rows_nI) == 2:  # For a gradient [1024, 512], outer products took 0.21 ms, and addmm_ 0.28 ms.
        torch.mul(dout_nO[0].unsqueeze(1), rows_nI[0], out=dweight_OI).addr_(dout_nO[1], rows_nI[1])
        return
    step = out_dim
    # With several threads, every part of the gradient would need two barriers.
    if len(rows_nI) <= MOST_IN_PARTS and torch.get_num_threads() == 1:
        step = max(1, PART_BYTES // (in_dim * dweight_OI.itemsize))
    if step >= out_dim:
        dweight_OI.zero_().addmm_(dout_nO.t(), rows_nI)
        return
    for dpart_pI, dout_pn in zip(dweight_OI.split(step), dout_nO.t().split(step), strict=True):
        dpart_pI.zero_().addmm_(dout_pn, rows_nI)
