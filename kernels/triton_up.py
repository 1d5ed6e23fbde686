"""Computes fc1, the first linear map, and the activation of all experts in one Triton kernel.

The kernel gathers tokens while it loads the operands, and applies the activation in the epilogue. The
products of fc1 and fc3 share one read of the rows. The activation's input h is rounded to the rows' dtype,
so that saved and recomputed activations are bit-identical.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.triton_activations import activate
from fairseq_tutel.kernels.triton_launch import (
    Plan,
    Product,
    alike,
    contiguous,
    launch,
    operands,
)
from fairseq_tutel.kernels.triton_operands import (
    load_bias,
    load_rows,
    load_weight,
    multiply,
    rows_operand,
    store_tile,
)
from fairseq_tutel.kernels.triton_tiles import place, read_tile


def ffn_up(
    x_ND: Tensor,
    index_R: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc3_weight: Tensor | None,
    fc3_bias: Tensor | None,
    groups: Groups,
    activation: str,
    keep: bool,
    tf32x3: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the FFN up to fc2's input: a = act(fc1(x)), or silu(fc1(x)) * fc3(x) for gated experts."""
    is_glu = fc3_weight is not None
    keep_h = keep and (is_glu or not ACTIVATIONS[activation].keeps_output)
    a_RH, h_RH, g_RH = triton_up(
        x_ND,
        index_R,
        fc1_weight,
        fc1_bias,
        fc3_weight,
        fc3_bias,
        groups.tiles((x_ND if index_R is None else index_R).shape[0]),
        "swish" if is_glu else activation,
        keep_h,
        tf32x3,
    )
    return a_RH, h_RH if keep_h else None, g_RH if keep_h and is_glu else None


def _up_shapes(
    x_ND: Tensor, index_R: Any, fc1_weight: Tensor, fc1_bias: Any, fc3_weight: Any, fc3_bias: Any,
    tiles: Any, activation: str, keep_h: bool, *_: Any,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    a_RH = x_ND.new_empty(num_rows, fc1_weight.shape[1])
    h_RH = torch.empty_like(a_RH) if keep_h else None
    g_RH = torch.empty_like(a_RH) if keep_h and fc3_weight is not None else None
    return a_RH, h_RH, g_RH


@opaque(_up_shapes)
def triton_up(
    x_ND: Tensor,
    index_R: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc3_weight: Tensor | None,
    fc3_bias: Tensor | None,
    tiles: Tensor,
    activation: str,
    keep_h: bool,
    tf32x3: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of `ffn_up`. Under torch.compile, a result is empty where `ffn_up` returns None.

    The arguments are those of `ffn_up`, with the tables of `row_tiles` in place of groups. If `fc3_weight`
    is given, `activation` must be "swish". If `keep_h` is set, the kernel also returns h and, with fc3, g.
    """
    a_RH, h_RH, g_RH = _up_shapes(
        x_ND, index_R, fc1_weight, fc1_bias, fc3_weight, fc3_bias, tiles, activation, keep_h
    )
    if a_RH.numel() == 0:
        return a_RH, h_RH, g_RH
    num_rows = a_RH.shape[0]
    x_ND = x_ND.contiguous()
    index_R, fc1_bias, fc3_bias = contiguous(index_R, fc1_bias, fc3_bias)
    is_glu = fc3_weight is not None
    weights = alike([fc1_weight] if fc3_weight is None else [fc1_weight, fc3_weight])

    kind = "glu_up" if is_glu else "relu_up" if activation == "relu" else "up"
    (x_from,), weights_from, product = operands(
        kind, num_rows, [x_ND], weights, tf32x3, are_gathered=index_R is not None
    )
    launch(
        _plan(product, activation),
        x_ND.device,
        x_from,
        index_R,
        weights_from[0],
        fc1_bias,
        weights_from[1] if is_glu else None,
        fc3_bias,
        a_RH,
        h_RH,
        g_RH,
        tiles,
    )
    return a_RH, h_RH, g_RH


@functools.lru_cache(maxsize=1024)
def _plan(product: Product, activation: str) -> Plan:
    return product.plan(_up_kernel, ACTIVATION=activation)


@triton.jit(do_not_specialize=["start", "tiles_m"])
def _up_kernel(
    x,
    index,
    weight,
    bias,
    gate_weight,
    gate_bias,
    a_out,
    h_out,
    g_out,
    tiles,
    start,
    tiles_m,
    N,
    K,
    stride_e,
    stride_n,
    stride_k,
    ACTIVATION: tl.constexpr,
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
    columns = n + tl.arange(0, BLOCK_N)
    h = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    g = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    strides = (stride_e, stride_n, stride_k)
    x_from = rows_operand(x, index, first, end, K, ROWS_DESCRIPTOR, BLOCK_M)
    for k in range(0, tl.where(expert < 0, 0, K), BLOCK_K):
        rows = load_rows(x_from, first, k, K, ROWS_DESCRIPTOR, BLOCK_K)
        w = load_weight(weight, strides, expert, n, k, N, K, WEIGHT_DESCRIPTOR, K_INNER, BLOCK_N, BLOCK_K)
        h = multiply(rows, w, h, PRECISION)
        if gate_weight is not None:
            w = load_weight(
                gate_weight, strides, expert, n, k, N, K, WEIGHT_DESCRIPTOR, K_INNER, BLOCK_N, BLOCK_K
            )
            g = multiply(rows, w, g, PRECISION)
    if bias is not None:
        h += load_bias(bias, expert, columns, N).to(ACC)[None, :]
    h = h.to(a_out.dtype.element_ty)
    if h_out is not None:
        store_tile(h_out, h, first, end, n, N)
    a = activate(h.to(ACC), ACTIVATION)
    if gate_weight is not None:
        if gate_bias is not None:
            g += load_bias(gate_bias, expert, columns, N).to(ACC)[None, :]
        g = g.to(a_out.dtype.element_ty)
        if g_out is not None:
            store_tile(g_out, g, first, end, n, N)
        a *= g.to(ACC)
    store_tile(a_out, a, first, end, n, N)
