"""Assigns row tiles to programs on the device, so that the host does not read the row counts.

The grid has R // BLOCK_M + E + 1 row tiles, which is an upper bound. Rows after the last group form an
additional group with expert -1. A row of the table is (expert, first row, end of the group's rows). In an
unused tile, the first row is not below the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TILES = 32
BLOCK_EXPERTS = 64


def tile_table(counts_E: Tensor, num_rows: int, block_m: int) -> Tensor:
    """Return the table of row tiles, [3, tiles] int64, computed on the device from row counts [E] int64."""
    num_experts = counts_E.shape[0]
    num_tiles = num_rows // block_m + num_experts + 1
    table = torch.empty(3, num_tiles, dtype=torch.int64, device=counts_E.device)
    _tile_table_kernel[(triton.cdiv(num_tiles, BLOCK_TILES),)](
        counts_E.contiguous(),
        table,
        num_rows,
        num_experts,
        num_tiles,
        BLOCK_M=block_m,
        BLOCK_E=BLOCK_EXPERTS,
        BLOCK_T=BLOCK_TILES,
    )
    return table


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _tile_table_kernel(
    counts,
    table,
    num_rows,
    num_experts,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    expert = tl.full([BLOCK_T], -1, tl.int64)
    first = tl.zeros([BLOCK_T], tl.int64)
    end = tl.zeros([BLOCK_T], tl.int64)
    rows_before = tl.full([], 0, tl.int64)
    tiles_before = tl.full([], 0, tl.int64)
    for first_expert in range(0, num_experts, BLOCK_E):
        e = first_expert + tl.arange(0, BLOCK_E)
        count = tl.load(counts + e, mask=e < num_experts, other=0)
        tiles = (count + BLOCK_M - 1) // BLOCK_M
        row_end = rows_before + tl.cumsum(count, 0)
        tile_end = tiles_before + tl.cumsum(tiles, 0)
        offset = tile[:, None] - (tile_end - tiles)[None, :]
        own = (offset >= 0) & (offset < tiles[None, :])  # at most one expert per tile
        expert += tl.sum(tl.where(own, e[None, :] + 1, 0), 1)
        first += tl.sum(tl.where(own, (row_end - count)[None, :] + offset * BLOCK_M, 0), 1)
        end += tl.sum(tl.where(own, row_end[None, :], 0), 1)
        rows_before += tl.sum(count, 0)
        tiles_before += tl.sum(tiles, 0)
    first = tl.where(expert < 0, rows_before + (tile - tiles_before) * BLOCK_M, first)
    end = tl.where(expert < 0, num_rows, end)
    inside = tile < num_tiles
    tl.store(table + tile, expert, mask=inside)
    tl.store(table + num_tiles + tile, first, mask=inside)
    tl.store(table + 2 * num_tiles + tile, end, mask=inside)


@triton.jit
def place(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the tile (m, n) of program `pid`; GROUP row tiles are processed together to reuse weights."""
    group = pid // (GROUP * tiles_n)
    in_group = pid % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    return group * GROUP + in_group % height, in_group // height


@triton.jit
def read_tile(table, tiles_m, m):
    """Read row tile m from the table: return its expert, its first row, and the end of the rows."""
    expert = tl.load(table + m)
    first = tl.load(table + tiles_m + m)
    end = tl.load(table + 2 * tiles_m + m)
    return expert, first, end
