"""Computes the gradients of every expert's weight and bias in Triton, summed over the expert's rows.

With TMA, the kernel loads blocks of rows. Each program writes one tile of an expert's weight gradient, or a
part of the bias gradient, so no sums across programs are needed. The gradients of an expert without rows
are set to zero.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import Tile, cdiv
from fairseq_tutel.kernels.triton_launch import (
    Plan,
    accumulator_of,
    blocks_of,
    chosen,
    contiguous,
    input_precision_of,
    launch,
)
from fairseq_tutel.kernels.triton_operands import multiply
from fairseq_tutel.kernels.triton_tiles import place


def grouped_weight_grad(
    dout_RO: Tensor,
    rows_RI: Tensor,
    groups: Groups,
    *,
    bias: bool = False,
    bias_scale_N: Tensor | None = None,
    bias_source_R: Tensor | None = None,
    tf32x3: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of each expert's weight and bias, summed over the expert's rows."""
    num_experts = groups.counts.shape[0]
    tiles = groups.tiles(dout_RO.shape[0])
    dweight_EOI, dbias_EO = triton_weight_grad(
        dout_RO, rows_RI, tiles, num_experts, bias, bias_scale_N, bias_source_R, tf32x3
    )
    return dweight_EOI, dbias_EO if bias else None


def _weight_grad_shapes(
    dout_RO: Tensor, rows_RI: Tensor, tiles: Tensor, num_experts: int, bias: bool, *_: Any
) -> tuple[Tensor, Any]:
    out_dim = dout_RO.shape[1]
    dweight_EOI = dout_RO.new_empty(num_experts, out_dim, rows_RI.shape[1])
    dbias_EO = dout_RO.new_empty(num_experts, out_dim) if bias else None
    return dweight_EOI, dbias_EO


@opaque(_weight_grad_shapes)
def triton_weight_grad(
    dout_RO: Tensor,
    rows_RI: Tensor,
    tiles: Tensor,
    num_experts: int,
    bias: bool,
    bias_scale_N: Tensor | None,
    bias_source_R: Tensor | None,
    tf32x3: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `grouped_weight_grad`.

    The arguments are those of `grouped_weight_grad`, with the tables of `row_tiles` and the number of
    experts in place of groups. Without `bias`, the bias gradient is None, or empty under torch.compile.
    """
    dweight_EOI, dbias_EO = _weight_grad_shapes(dout_RO, rows_RI, tiles, num_experts, bias)
    if dweight_EOI.numel() == 0:
        return dweight_EOI, dbias_EO
    dout_RO, rows_RI = dout_RO.contiguous(), rows_RI.contiguous()
    bias_scale_N, bias_source_R = contiguous(bias_scale_N, bias_source_R)
    shape = num_experts, rows_RI.shape[1], dout_RO.shape[1]
    tile, hardware, precision = chosen("weight", dout_RO, dout_RO.shape[0], shape, tf32x3)
    launch(
        _plan(dweight_EOI.shape, bias, dout_RO.dtype, tile, hardware, precision),
        dout_RO.device,
        dout_RO,
        blocks_of(dout_RO, hardware, (tile.block_k, tile.block_m)),
        rows_RI,
        blocks_of(rows_RI, hardware, (tile.block_k, tile.block_n)),
        bias_scale_N,
        bias_source_R,
        tiles,
        dweight_EOI,
        dbias_EO,
    )
    return dweight_EOI, dbias_EO


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size, bias: bool, dtype: torch.dtype, tile: Tile, hardware: str, precision: str
) -> Plan:
    num_experts, out_dim, in_dim = shape
    tiles_i = cdiv(in_dim, tile.block_n) + bias
    constants = {
        "PRECISION": input_precision_of(hardware, precision, dtype),
        "ACC": accumulator_of(dtype),
        "BLOCK_O": tile.block_m,
        "BLOCK_I": tile.block_n,
        "BLOCK_R": tile.block_k,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = (num_experts * cdiv(out_dim, tile.block_m) * tiles_i,)
    return Plan(_weight_grad_kernel, grid, (out_dim, in_dim), constants)


@triton.jit
def _load(x, r, end, columns, D, ARE_INSIDE: tl.constexpr):
    """Load a tile [rows, columns] of x. Unless ARE_INSIDE is set, rows from `end` on are zeros."""
    inside = (columns < D)[None, :]
    if not ARE_INSIDE:
        inside &= (r < end)[:, None]
    return tl.load(x + r.to(tl.int64)[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_transposed(x, r, end, columns, D, ARE_INSIDE: tl.constexpr):
    """Load a transposed tile [columns, rows] of x, like `_load`.

    The load itself transposes the tile, because not every GPU prefetches tiles that are transposed later.
    """
    inside = (columns < D)[:, None]
    if not ARE_INSIDE:
        inside &= (r < end)[None, :]
    return tl.load(x + r.to(tl.int64)[None, :] * D + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _write_bias(dout, scale, source, dbias, expert, first, end, o, OUT, ACC, BLOCK_R: tl.constexpr):
    """Sum scale[source[r]] * dout[r] over an expert's rows r, and write columns o of the sum to dbias."""
    # Each element of a tile has a separate sum. A sum over rows in each step would synchronize the warps.
    sums = tl.zeros([o.shape[0], BLOCK_R], dtype=ACC)
    # Without `num_stages`, the compiler prefetches the loads of a loop only if it has matrix products.
    for r_0 in tl.range(first, end, BLOCK_R, num_stages=2):
        r = r_0 + tl.arange(0, BLOCK_R)
        tile = _load_transposed(dout, r, end, o, OUT, False).to(ACC)
        if scale is not None:
            of_row = tl.load(source + r, mask=r < end, other=0)
            tile *= tl.load(scale + of_row, mask=r < end, other=0.0).to(ACC)[None, :]
        sums += tile
    tl.store(dbias + expert.to(tl.int64) * OUT + o, tl.sum(sums, 1), mask=o < OUT)


@triton.jit
def _weight_grad_kernel(
    dout,
    dout_blocks,
    rows,
    rows_blocks,
    bias_scale,
    bias_source,
    starts,
    dweight,
    dbias,
    OUT,
    IN,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_o, tiles_i = tl.cdiv(OUT, BLOCK_O), tl.cdiv(IN, BLOCK_I)
    if dbias is not None:
        tiles_i += 1  # the programs of the last tile column compute the bias gradient
    expert = tl.program_id(0) // (tiles_o * tiles_i)
    tile_o, tile_i = place(tl.program_id(0) % (tiles_o * tiles_i), tiles_o, tiles_i, GROUP)
    first = tl.load(starts + expert).to(tl.int32)
    end = tl.load(starts + expert + 1).to(tl.int32)
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    if dbias is not None:  # noqa: SIM102 (the first condition is evaluated at compile time)
        if tile_i == tiles_i - 1:
            _write_bias(dout, bias_scale, bias_source, dbias, expert, first, end, o, OUT, ACC, BLOCK_R)
            return
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], dtype=ACC)
    # A descriptor also reads rows of the next expert, so only complete blocks are read by descriptors.
    HAS_BLOCKS: tl.constexpr = dout_blocks is not None or rows_blocks is not None
    complete = first + (end - first) // BLOCK_R * BLOCK_R if HAS_BLOCKS else end
    for r_0 in range(first, complete, BLOCK_R):
        r = r_0 + tl.arange(0, BLOCK_R)
        if dout_blocks is not None:
            dout_tile = dout_blocks.load([r_0, tile_o * BLOCK_O]).T
        else:
            dout_tile = _load_transposed(dout, r, end, o, OUT, HAS_BLOCKS)
        if rows_blocks is not None:
            rows_tile = rows_blocks.load([r_0, tile_i * BLOCK_I])
        else:
            rows_tile = _load(rows, r, end, i, IN, HAS_BLOCKS)
        total = multiply(dout_tile, rows_tile, total, PRECISION)
    if HAS_BLOCKS:  # noqa: SIM102 (the first condition is evaluated at compile time)
        if complete < end:
            r = complete + tl.arange(0, BLOCK_R)
            dout_tile = _load_transposed(dout, r, end, o, OUT, False)
            rows_tile = _load(rows, r, end, i, IN, False)
            total = multiply(dout_tile, rows_tile, total, PRECISION)
    row = expert.to(tl.int64) * OUT + o
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    tl.store(dweight + row[:, None] * IN + i[None, :], total, mask=inside)
