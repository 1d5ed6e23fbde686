"""The backward pass through fc2 and the activation of all experts, in one Triton kernel.

`reference` describes `ffn_down_backward`. The epilogue of the matrix product computes the gradients of each
row's gate weight and of h, the activation's input. The epilogue also writes the activation's output times
the gate weight, from which the weight gradient of fc2 is computed later.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import cdiv
from fairseq_tutel.kernels.triton_activations import activate, activate_backward
from fairseq_tutel.kernels.triton_launch import Plan, Product, contiguous, launch, operands
from fairseq_tutel.kernels.triton_operands import (
    add_product,
    load_bias,
    load_rows,
    load_tile,
    rows_operand,
    store_tile,
)
from fairseq_tutel.kernels.triton_tiles import place, read_tile


def ffn_down_backward(
    dy_RD: Tensor,
    gate_N: Tensor | None,
    source_R: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    a_RH: Tensor | None,
    h_RH: Tensor | None,
    g_RH: Tensor | None,
    groups: Groups,
    activation: str,
    tf32x3: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Compute the backward pass through the FFN's second linear map (fc2) and the activation.

    Returns (dh_RH, dg_RH, gated_RH, dgate_PR).
    """
    dh_RH, dg_RH, gated_RH, dgate_PR = triton_hidden(
        dy_RD,
        gate_N,
        source_R,
        fc2_weight,
        fc2_bias,
        a_RH,
        h_RH,
        g_RH,
        groups.tiles(dy_RD.shape[0]),
        activation if g_RH is None else "swish",
        tf32x3,
    )
    return (
        dh_RH,
        None if g_RH is None else dg_RH,
        gated_RH if a_RH is None or gate_N is not None else a_RH,
        None if gate_N is None else dgate_PR,
    )


def _hidden_shapes(
    dy_RD: Tensor, gate_N: Any, source_R: Any, fc2_weight: Tensor, fc2_bias: Any, a_RH: Any, h_RH: Any,
    g_RH: Any, *_: Any, parts: int = 1,
) -> tuple[Tensor, Any, Any, Any]:  # fmt: skip
    num_rows = dy_RD.shape[0]
    dh_RH = dy_RD.new_empty(num_rows, fc2_weight.shape[2])
    dg_RH = None if g_RH is None else torch.empty_like(dh_RH)
    writes_a = a_RH is None or gate_N is not None
    gated_RH = torch.empty_like(dh_RH) if writes_a else None
    dgate_PR, sum_dtype = None, torch.float64 if dy_RD.dtype == torch.float64 else torch.float32
    if gate_N is not None:
        dgate_PR = dh_RH.new_empty(parts, num_rows, dtype=sum_dtype)
    return dh_RH, dg_RH, gated_RH, dgate_PR


def _summed(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sum the parts of the gate's gradient, because the operator's fake implementation returns one part."""
    return *found[:3], None if found[3] is None else found[3].sum(0, keepdim=True)


@opaque(_hidden_shapes, _summed)
def triton_hidden(
    dy_RD: Tensor,
    gate_N: Tensor | None,
    source_R: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    a_RH: Tensor | None,
    h_RH: Tensor | None,
    g_RH: Tensor | None,
    tiles: Tensor,
    activation: str,
    tf32x3: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel of `ffn_down_backward`. Unneeded results are None, or empty under torch.compile.

    The arguments are those of `ffn_down_backward`, with the tables of `row_tiles` in place of groups.
    `activation` is the function that was applied to h. If `g_RH` is given, `activation` must be "swish".
    """
    num_rows = dy_RD.shape[0]
    weight_EHD = fc2_weight.mT
    kind = "glu_hidden" if g_RH is not None else "relu_hidden" if activation == "relu" else "hidden"
    dy_RD = dy_RD.contiguous()
    (dy_from,), (weight_from,), product = operands(kind, num_rows, [dy_RD], [weight_EHD], tf32x3)
    has_dots = gate_N is not None and fc2_bias is not None
    tiles_n = cdiv(weight_EHD.shape[1], product.tile.block_n) + has_dots
    # Each column tile writes one part of the gate's gradient. The parts are added in a fixed order without
    # atomics, so the result is deterministic.
    dh_RH, dg_RH, gated_RH, dgate_PR = _hidden_shapes(
        dy_RD, gate_N, source_R, fc2_weight, fc2_bias, a_RH, h_RH, g_RH, parts=tiles_n
    )
    if dh_RH.numel() == 0:
        return dh_RH, dg_RH, gated_RH, dgate_PR
    gate_N, source_R, fc2_bias, a_RH, h_RH, g_RH = contiguous(gate_N, source_R, fc2_bias, a_RH, h_RH, g_RH)
    launch(
        _plan(product, has_dots, activation, torch.version.hip is None),
        dy_RD.device,
        dy_from,
        gate_N,
        source_R,
        weight_from,
        fc2_bias,
        a_RH,
        h_RH,
        g_RH,
        dh_RH,
        dg_RH,
        gated_RH,
        dgate_PR,
        tiles,
    )
    return dh_RH, dg_RH, gated_RH, dgate_PR


@functools.lru_cache(maxsize=1024)
def _plan(product: Product, has_dots: bool, activation: str, is_cuda: bool) -> Plan:
    # On AMD, the epilogue splits a tile into two parts, because four parts need twice the shared memory.
    constants = {"ACTIVATION": activation, "IS_CUDA": is_cuda}
    return product.plan(_hidden_kernel, has_dots, (product.num_rows,), **constants)


@triton.jit(do_not_specialize=["start", "tiles_m", "num_rows"])
def _hidden_kernel(
    dy,
    gate,
    source,
    weight,
    bias,
    a_in,
    h_in,
    g_in,
    dh_out,
    dg_out,
    a_out,
    parts,
    tiles,
    num_rows,
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
    IS_CUDA: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    HAS_DOTS: tl.constexpr = gate is not None and bias is not None
    if HAS_DOTS:
        tiles_n += 1  # the programs of the last tile column compute <dy, bias>
    m, n_tile = place(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = read_tile(tiles, start, tiles_m, m)
    if first >= end:
        return
    if HAS_DOTS:  # noqa: SIM102 (the first condition is evaluated at compile time)
        if n_tile == tiles_n - 1:
            r = first + tl.arange(0, BLOCK_M)
            dots = _bias_dots(dy, bias, expert, first, end, K, ACC, ROWS_DESCRIPTOR, BLOCK_M, BLOCK_K)
            tl.store(parts + n_tile.to(tl.int64) * num_rows + r, dots, mask=r < end)
            return
    n = n_tile * BLOCK_N
    rows = tl.arange(0, BLOCK_M)
    count = (end - first).to(tl.int32)  # a 32-bit number needs fewer registers
    readable = tl.where(expert < 0, 0, count)  # rows after the last group are not read
    # A row's gate weight is loaded before the product, so that the epilogue does not wait for it.
    scale = tl.full([BLOCK_M], 1, ACC)
    if gate is not None:
        sources = tl.load(source + first + rows, mask=rows < readable, other=0)
        scale = tl.load(gate + sources, mask=rows < readable, other=0.0).to(ACC)
    # The epilogue holds up to six values per element. Splitting the tile into parts saves registers.
    PARTS: tl.constexpr = 2 if not IS_CUDA else 4 if BLOCK_N <= 128 else 8
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    kept_in = a_in if h_in is None else h_in
    # Activations are loaded AHEAD parts early, so that the epilogue does not wait. This needs registers:
    # with g they would spill, and of smaller tiles, only one instead of two would fit on a multiprocessor.
    AHEAD: tl.constexpr = 2 if g_in is None and BLOCK_N > 128 else 0
    saved = ()  # type: tuple[Any, ...]
    for i in tl.static_range(AHEAD):
        saved += (_load_saved(kept_in, g_in, first, readable, n + i * WIDTH, N, BLOCK_M, WIDTH),)
    da = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    da = add_product(
        da, dy, weight, (stride_e, stride_n, stride_k), (expert, first, end, n), (N, K),
        PRECISION, ROWS_DESCRIPTOR, WEIGHT_DESCRIPTOR, K_INNER, BLOCK_K,
    )  # fmt: skip
    part = tl.zeros([BLOCK_M], dtype=ACC)
    pieces = _halves(da)
    if IS_CUDA:
        pieces = _halves(pieces[0]) + _halves(pieces[1])
    if IS_CUDA and BLOCK_N > 128:
        pieces = _halves(pieces[0]) + _halves(pieces[1]) + _halves(pieces[2]) + _halves(pieces[3])
    for i in tl.static_range(PARTS):
        if i + AHEAD < PARTS:
            later = n + (i + AHEAD) * WIDTH
            saved += (_load_saved(kept_in, g_in, first, readable, later, N, BLOCK_M, WIDTH),)
        part += _hidden_backward(
            pieces[i], saved[i], scale, dh_out, dg_out, a_out, first, count, n + i * WIDTH, N, h_in is None,
            ACTIVATION,
        )  # fmt: skip
    if gate is not None:
        part_at = parts + n_tile.to(tl.int64) * num_rows
        if IS_CUDA:
            tl.store(part_at + first + rows, part, mask=rows < count)
        else:  # on gfx950, the line above would add 23 instructions to the main loop
            tl.store(part_at + (first + rows), part, mask=first + rows < end)


@triton.jit
def _halves(tile):
    """Split a tile into its left half and its right half."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _bias_dots(
    dy,
    bias,
    expert,
    first,
    end,
    K,
    ACC: tl.constexpr,
    ROWS_DESCRIPTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """For each row of a tile, return the dot product of the row's dy with the bias of the row's expert."""
    dots = tl.zeros([BLOCK_M, BLOCK_K], dtype=ACC)
    dy_from = rows_operand(dy, None, first, end, K, ROWS_DESCRIPTOR, BLOCK_M)
    # Without `num_stages`, the compiler prefetches loads only in loops that have matrix products.
    for k in tl.range(0, tl.where(expert < 0, 0, K), BLOCK_K, num_stages=2):
        rows = load_rows(dy_from, first, k, K, ROWS_DESCRIPTOR, BLOCK_K)
        b = load_bias(bias, expert, k + tl.arange(0, BLOCK_K), K)
        dots += rows.to(ACC) * b.to(ACC)[None, :]
    return tl.sum(dots, 1)


@triton.jit
def _load_saved(kept_in, g_in, first, readable, n, N, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Load a part of the saved activations: a or h, and g. Without g, the second result is not used."""
    kept = load_tile(kept_in + first * N, 0, readable, n, N, BLOCK_M, WIDTH)
    g = kept
    if g_in is not None:
        g = load_tile(g_in + first * N, 0, readable, n, N, BLOCK_M, WIDTH)
    return kept, g


@triton.jit
def _hidden_backward(
    da,
    saved,
    scale,
    dh_out,
    dg_out,
    a_out,
    first,
    count,
    n,
    N,
    HAS_A: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Write one tile of dh, of dg and of scale * a. Return each row's dot product <da, a>."""
    kept = saved[0].to(da.dtype)
    g = saved[1].to(da.dtype)
    if HAS_A:
        a = kept
    else:
        a = activate(kept, ACTIVATION)
        if dg_out is not None:
            a *= g
        a = a.to(dh_out.dtype.element_ty).to(da.dtype)  # the forward pass also rounded a
    part = tl.sum(da * a, 1)
    if a_out is not None:
        store_tile(a_out + first * N, a * scale[:, None], 0, count, n, N)
    da *= scale[:, None]
    if dg_out is not None:
        store_tile(dg_out + first * N, da * activate(kept, ACTIVATION), 0, count, n, N)
        da *= g
    store_tile(dh_out + first * N, activate_backward(da, kept, ACTIVATION), 0, count, n, N)
    return part
