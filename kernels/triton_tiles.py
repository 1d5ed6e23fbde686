"""Assigns row tiles to programs on the device, so that the host does not read the row counts.

The grid for R rows and E experts has R // BLOCK_M + E + 1 row tiles, at least as many as are needed. Rows
after the last group form an additional group with expert -1. A table holds (expert, first row, end of the
group's rows) for each row tile. In a row tile without rows, the first row is the end or later.
"""

import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import BLOCKS_M, cdiv, num_tiles, table_start
from fairseq_tutel.kernels.triton_launch import Plan, launch

BLOCK_TILES = 32
# The compile-time constants of a kernel that calls `write_tiles`.
CONSTANTS = {"SIZES": len(BLOCKS_M), "SMALLEST": BLOCKS_M[0], "TILES_E": 64, "BLOCK_T": BLOCK_TILES}


def _fake_row_tiles(counts_E: Tensor, num_rows: int) -> Tensor:
    num_experts = counts_E.shape[0]
    return counts_E.new_empty(table_start(num_rows, num_experts, 2 * BLOCKS_M[-1]))


@opaque(_fake_row_tiles)
def row_tiles(counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the first row of every expert, and a table of row tiles for each BLOCK_M, in one tensor.

    Args:
        counts_E: [E] int64, the number of rows of each expert.
        num_rows: R, at least the sum of the counts.

    Returns:
        [E + 1 + 3 * tiles] int64: the first row of each expert, the end of the last expert's rows, and a
        table [3, tiles] for each number in BLOCKS_M.
    """
    tiles, num_experts = _fake_row_tiles(counts_E, num_rows), counts_E.shape[0]
    grid = (tile_programs(num_rows, num_experts),)
    plan = Plan(_row_tiles_kernel, grid, (num_rows, num_experts), CONSTANTS)
    launch(plan, counts_E.device, counts_E.contiguous(), tiles)
    return tiles


def tile_programs(num_rows: int, num_experts: int) -> int:
    """Return the number of Triton programs that `write_tiles` needs."""
    return cdiv(num_tiles(num_rows, num_experts, BLOCKS_M[0]), BLOCK_TILES) * len(BLOCKS_M)


@triton.jit(do_not_specialize=["num_rows"])
def _row_tiles_kernel(
    counts, tiles, num_rows, num_experts, SIZES: tl.constexpr, SMALLEST: tl.constexpr,
    TILES_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    write_tiles(tl.program_id(0), counts, tiles, num_rows, num_experts, SIZES, SMALLEST, TILES_E, BLOCK_T)


@triton.jit
def write_tiles(
    program, counts, tiles, num_rows, num_experts, SIZES: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write one program's part of the tables of `row_tiles`."""
    # Each number in BLOCKS_M is twice the previous one. Numbers of 32 bits need fewer registers.
    block_m = tl.full([], SMALLEST, tl.int32)
    num_rows = tl.cast(num_rows, tl.int32)
    table = tiles + num_experts + 1
    for _ in range(program % SIZES):
        table += 3 * (num_rows // block_m + num_experts + 1)
        block_m *= 2
    num_tiles = num_rows // block_m + num_experts + 1
    if program // SIZES * BLOCK_T >= num_tiles:
        return
    tile = program // SIZES * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.full([BLOCK_T], -1, tl.int32)
    first = tl.zeros([BLOCK_T], tl.int32)
    end = tl.zeros([BLOCK_T], tl.int32)
    rows_before = tl.full([], 0, tl.int32)
    tiles_before = tl.full([], 0, tl.int32)
    is_first = program == 0
    written = tl.where(is_first, num_experts, 0)  # the first program also writes each expert's first row
    for first_expert in range(0, num_experts, BLOCK_E):
        e = first_expert + tl.arange(0, BLOCK_E)
        count = tl.load(counts + e, mask=e < num_experts, other=0).to(tl.int32)
        tiles_of = (count + block_m - 1) // block_m
        row_end = rows_before + tl.cumsum(count, 0)
        tile_end = tiles_before + tl.cumsum(tiles_of, 0)
        offset = tile[:, None] - (tile_end - tiles_of)[None, :]
        own = (offset >= 0) & (offset < tiles_of[None, :])  # A tile has at most one expert.
        expert += tl.sum(tl.where(own, e[None, :] + 1, 0), 1)
        first += tl.sum(tl.where(own, (row_end - count)[None, :] + offset * block_m, 0), 1)
        end += tl.sum(tl.where(own, row_end[None, :], 0), 1)
        tl.store(tiles + e, row_end - count, mask=e < written)
        rows_before += tl.sum(count, 0)
        tiles_before += tl.sum(tiles_of, 0)
    if is_first:
        tl.store(tiles + num_experts, rows_before)
    first = tl.where(expert < 0, rows_before + (tile - tiles_before) * block_m, first)
    end = tl.where(expert < 0, num_rows, end)
    inside = tile < num_tiles
    tl.store(table + tile, expert, mask=inside)
    tl.store(table + num_tiles + tile, first, mask=inside)
    tl.store(table + 2 * num_tiles + tile, end, mask=inside)


@triton.jit
def place(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the tile (m, n) of program `pid`. GROUP row tiles are processed together to reuse weights."""
    group = pid // (GROUP * tiles_n)
    in_group = pid % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    return group * GROUP + in_group % height, in_group // height


@triton.jit
def read_tile(tiles, start, tiles_m, m):
    """Return the expert, first row and end of row tile m, from the table that begins at index `start`."""
    table = tiles + start
    expert = tl.load(table + m)
    first = tl.load(table + tiles_m + m)
    end = tl.load(table + 2 * tiles_m + m)
    return expert, first, end
