"""Computes the gradients of every expert's weight and bias in Triton, summed over the expert's rows.

The kernel gathers rows while it loads the operands. With TMA, it loads contiguous rows in blocks. Each
program writes one tile of an expert's weight gradient, or a part of the bias gradient, so no sums across
programs are needed. The gradients of an expert without rows are set to zero.
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
    dout_NO: Tensor,
    rows_NI: Tensor,
    groups: Groups,
    *,
    dout_index_R: Tensor | None = None,
    rows_index_R: Tensor | None = None,
    bias: bool = False,
    bias_scale_N: Tensor | None = None,
    bias_source_R: Tensor | None = None,
    tf32x3: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of each expert's weight and bias, summed over the expert's rows."""
    num_experts = groups.counts.shape[0]
    tiles = groups.tiles((dout_NO if dout_index_R is None else dout_index_R).shape[0])
    dweight_EOI, dbias_EO = triton_weight_grad(
        dout_NO, rows_NI, tiles, num_experts, dout_index_R, rows_index_R, bias, bias_scale_N, bias_source_R,
        tf32x3,
    )  # fmt: skip
    return dweight_EOI, dbias_EO if bias else None


def _weight_grad_shapes(
    dout_NO: Tensor, rows_NI: Tensor, tiles: Tensor, num_experts: int, of_dout: Any, of_rows: Any,
    bias: bool, *_: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    out_dim = dout_NO.shape[1]
    dweight_EOI = dout_NO.new_empty(num_experts, out_dim, rows_NI.shape[1])
    dbias_EO = dout_NO.new_empty(num_experts, out_dim) if bias else None
    return dweight_EOI, dbias_EO


@opaque(_weight_grad_shapes)
def triton_weight_grad(
    dout_NO: Tensor,
    rows_NI: Tensor,
    tiles: Tensor,
    num_experts: int,
    dout_index_R: Tensor | None,
    rows_index_R: Tensor | None,
    bias: bool,
    bias_scale_N: Tensor | None,
    bias_source_R: Tensor | None,
    tf32x3: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `grouped_weight_grad`.

    The arguments are those of `grouped_weight_grad`, with the tables of `row_tiles` and the number of
    experts in place of groups. Without `bias`, the bias gradient is None, or empty under torch.compile.
    """
    dweight_EOI, dbias_EO = _weight_grad_shapes(
        dout_NO, rows_NI, tiles, num_experts, dout_index_R, rows_index_R, bias
    )
    if dweight_EOI.numel() == 0:
        return dweight_EOI, dbias_EO
    dout_NO, rows_NI = dout_NO.contiguous(), rows_NI.contiguous()
    dout_index_R, rows_index_R, bias_scale_N, bias_source_R = contiguous(
        dout_index_R, rows_index_R, bias_scale_N, bias_source_R
    )

    num_rows = (dout_NO if dout_index_R is None else dout_index_R).shape[0]
    shape = num_experts, rows_NI.shape[1], dout_NO.shape[1]
    tile, hardware, precision = chosen("weight", dout_NO, num_rows, shape, tf32x3)
    launch(
        _plan(dweight_EOI.shape, bias, dout_NO.dtype, tile, hardware, precision),
        dout_NO.device,
        dout_NO,
        blocks_of(dout_NO, dout_index_R, hardware, (tile.block_k, tile.block_m)),
        dout_index_R,
        rows_NI,
        blocks_of(rows_NI, rows_index_R, hardware, (tile.block_k, tile.block_n)),
        rows_index_R,
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
def _sources(index, r, end):
    """Return the row of the source tensor for each row r: index[r], or r if there is no index."""
    source = r.to(tl.int64)
    if index is not None:
        source = tl.load(index + r, mask=r < end, other=0)
    return source


@triton.jit
def _load(x, source, r, end, columns, D, ARE_INSIDE: tl.constexpr):
    """Load a tile [rows, columns] of x[source]. Unless ARE_INSIDE is set, rows from `end` on are zeros."""
    inside = (columns < D)[None, :]
    if not ARE_INSIDE:
        inside &= (r < end)[:, None]
    return tl.load(x + source[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_transposed(x, source, r, end, columns, D, ARE_INSIDE: tl.constexpr):
    """Load a transposed tile [columns, rows] of x[source]. Rows from `end` on are zeros.

    The load itself transposes the tile, because not every GPU prefetches tiles that are transposed later.
    """
    inside = (columns < D)[:, None]
    if not ARE_INSIDE:
        inside &= (r < end)[None, :]
    return tl.load(x + source[None, :] * D + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _write_bias(
    dout, dout_index, scale, source, dbias, expert, first, end, o, OUT, ACC, BLOCK_R: tl.constexpr
):
    """Sum scale[source[r]] * dout[r] over an expert's rows r, and write columns o of the sum to dbias."""
    # Each element of a tile has a separate sum. A sum over rows in each step would synchronize the warps.
    sums = tl.zeros([o.shape[0], BLOCK_R], dtype=ACC)
    # Without `num_stages`, the compiler prefetches the loads of a loop only if it has matrix products.
    for r_0 in tl.range(first, end, BLOCK_R, num_stages=2):
        r = r_0 + tl.arange(0, BLOCK_R)
        tile = _load_transposed(dout, _sources(dout_index, r, end), r, end, o, OUT, False).to(ACC)
        if scale is not None:
            of_row = _sources(source, r, end)
            tile *= tl.load(scale + of_row, mask=r < end, other=0.0).to(ACC)[None, :]
        sums += tile
    tl.store(dbias + expert.to(tl.int64) * OUT + o, tl.sum(sums, 1), mask=o < OUT)


@triton.jit
def _weight_grad_kernel(
    dout,
    dout_blocks,
    dout_index,
    rows,
    rows_blocks,
    rows_index,
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
            _write_bias(
                dout, dout_index, bias_scale, bias_source, dbias, expert, first, end, o, OUT, ACC, BLOCK_R
            )
            return
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], dtype=ACC)
    r = first + tl.arange(0, BLOCK_R)
    # Indices are read one step ahead, so that the loads of the tiles do not wait for the indices.
    dout_source, rows_source = _sources(dout_index, r, end), _sources(rows_index, r, end)
    # A descriptor also reads rows of the next expert, so only complete blocks are read by descriptors.
    HAS_BLOCKS: tl.constexpr = dout_blocks is not None or rows_blocks is not None
    complete = first + (end - first) // BLOCK_R * BLOCK_R if HAS_BLOCKS else end
    for r_0 in range(first, complete, BLOCK_R):
        if dout_blocks is not None:
            dout_tile = dout_blocks.load([r_0, tile_o * BLOCK_O]).T
        else:
            dout_tile = _load_transposed(dout, dout_source, r, end, o, OUT, HAS_BLOCKS)
        if rows_blocks is not None:
            rows_tile = rows_blocks.load([r_0, tile_i * BLOCK_I])
        else:
            rows_tile = _load(rows, rows_source, r, end, i, IN, HAS_BLOCKS)
        total = multiply(dout_tile, rows_tile, total, PRECISION)
        r += BLOCK_R
        dout_source, rows_source = _sources(dout_index, r, end), _sources(rows_index, r, end)
    if HAS_BLOCKS:  # noqa: SIM102 (the first condition is evaluated at compile time)
        if complete < end:
            dout_tile = _load_transposed(dout, dout_source, r, end, o, OUT, False)
            rows_tile = _load(rows, rows_source, r, end, i, IN, False)
            total = multiply(dout_tile, rows_tile, total, PRECISION)
    row = expert.to(tl.int64) * OUT + o
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    tl.store(dweight + row[:, None] * IN + i[None, :], total, mask=inside)
