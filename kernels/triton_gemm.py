"""Grouped matrix products in Triton: each row is multiplied by its expert's weight.

The functions have the signatures of `reference`. Sums are computed in fp32, or in fp64 for fp64 tensors,
which only the interpreter supports. One program writes each output element, so results are deterministic.
"""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.triton_launch import Plan, Product, alike, launch, operands
from fairseq_tutel.kernels.triton_operands import add_product, load_bias, store_tile
from fairseq_tutel.kernels.triton_tiles import place, read_tile


def grouped_linear(
    rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups, tf32x3: bool = False
) -> Tensor:
    """Multiply each row of group e by its expert's weight: out[r] = rows[r] @ weight[e].T + bias[e]."""
    return triton_linear(rows_RI, weight_EOI, bias_EO, None, None, groups.tiles(rows_RI.shape[0]), tf32x3)


def ffn_up_backward(
    dh_RH: Tensor,
    fc1_weight: Tensor,
    dg_RH: Tensor | None,
    fc3_weight: Tensor | None,
    groups: Groups,
    tf32x3: bool = False,
) -> Tensor:
    """Compute the gradient of the FFN's input rows from the gradients of fc1's and fc3's outputs."""
    fc3_weight = None if fc3_weight is None else fc3_weight.mT
    tiles = groups.tiles(dh_RH.shape[0])
    return triton_linear(dh_RH, fc1_weight.mT, None, dg_RH, fc3_weight, tiles, tf32x3)


def _linear_shape(rows_RI: Tensor, weight_EOI: Tensor, *_: Any) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])


@opaque(_linear_shape)
def triton_linear(
    rows_RI: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    more_RI: Tensor | None,
    more_weight_EOI: Tensor | None,
    tiles: Tensor,
    tf32x3: bool,
) -> Tensor:
    """Compute rows @ weight.T + bias + more @ more_weight.T, with the weights of each row's expert."""
    num_rows = rows_RI.shape[0]
    out_RO = _linear_shape(rows_RI, weight_EOI)
    if out_RO.numel() == 0:
        return out_RO
    rows = [x.contiguous() for x in (rows_RI, more_RI) if x is not None]
    weights = alike([w for w in (weight_EOI, more_weight_EOI) if w is not None])
    bias_EO = None if bias_EO is None else bias_EO.contiguous()

    # Only strides distinguish a forward product from a backward product, which reads transposed weights.
    kind = "glu_dx" if more_RI is not None else "linear" if weights[0].stride(2) == 1 else "dx"
    rows_from, weights_from, product = operands(kind, num_rows, rows, weights, tf32x3)
    launch(
        _plan(product),
        rows_RI.device,
        rows_from[0],
        weights_from[0],
        bias_EO,
        rows_from[1] if more_RI is not None else None,
        weights_from[1] if more_RI is not None else None,
        out_RO,
        tiles,
    )
    return out_RO


@functools.lru_cache(maxsize=1024)
def _plan(product: Product) -> Plan:
    return product.plan(_linear_kernel)


@triton.jit(do_not_specialize=["start", "tiles_m"])
def _linear_kernel(
    rows,
    weight,
    bias,
    more,
    more_weight,
    out,
    tiles,
    start,
    tiles_m,
    N,
    K,
    stride_e,
    stride_n,
    stride_k,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    ROWS_DESCRIPTOR: tl.constexpr,
    WEIGHT_DESCRIPTOR: tl.constexpr,
    K_INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    m, n_tile = place(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP)
    expert, first, end = read_tile(tiles, start, tiles_m, m)
    if first >= end:
        return
    n = n_tile * BLOCK_N
    strides = (stride_e, stride_n, stride_k)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    tile, sizes = (expert, first, end, n), (N, K)
    total = add_product(
        total, rows, weight, strides, tile, sizes,
        PRECISION, ROWS_DESCRIPTOR, WEIGHT_DESCRIPTOR, K_INNER, BLOCK_K,
    )  # fmt: skip
    if more is not None:
        total = add_product(
            total, more, more_weight, strides, tile, sizes,
            PRECISION, ROWS_DESCRIPTOR, WEIGHT_DESCRIPTOR, K_INNER, BLOCK_K,
        )  # fmt: skip
    columns = n + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += load_bias(bias, expert, columns, N).to(ACC)[None, :]
    store_tile(out, total, first, end, n, N)
