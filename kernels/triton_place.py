"""Triton kernels that assign slots and rows; they replace `reference_route.assign_rows` on GPUs.

Slots are computed by a block scan in three steps: a histogram of every block of assignments, an exclusive
sum over the blocks, and comparisons of the ids within a block. The last step also writes the row maps and
the tables of row tiles. The scan needs no atomics, sort, [T, E] tensor or host read. T tokens, E experts,
K top_k, N = K * T assignments. Assignment j * T + t is choice j of token t.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.reference_route import Rows
from fairseq_tutel.kernels.tiles import BLOCKS_M, cdiv, table_start
from fairseq_tutel.kernels.triton_launch import Plan, launch
from fairseq_tutel.kernels.triton_tiles import CONSTANTS, tile_programs, write_tiles

# A block has BLOCK_N assignments. `_place_kernel` compares each of them with all assignments of the block,
# PEERS at a time. Comparing 32 at a time spills scalar registers on gfx90a. The numbers are not tuned.
BLOCK_N, PEERS = 128, 16
# The number of experts that a program counts or sums at a time.
COUNT_BLOCK_E = 32
# Sizes of a [blocks, experts] tile of the scan. With few experts per tile, many tiles run in parallel.
SCAN_BLOCK_B, SCAN_BLOCK_E = 256, 8


def assign_rows(
    ids_TK: Tensor,
    num_experts: int,
    asked_TK: Tensor | None = None,
    order_N: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
    limit: Tensor | None = None,
) -> Rows:
    """Number each expert's assignments, and assign rows to the kept assignments, expert by expert.

    The row maps have N rows, since the exact number would need a host read. Unused rows have source -1.
    """
    time, batch = time_first or (1, ids_TK.shape[0])
    found = place_assignments(ids_TK, asked_TK, order_N, limit, num_experts, time, batch)
    slots_TK, row_of_TK, source_of_R, token_of_R, counts = found
    if ids_TK.shape[1] == 1:  # then assignment t belongs to token t
        token_of_R = source_of_R
    assigned_KE, counts_E, dropped_K, tiles = _parts(counts, ids_TK.shape[1], num_experts)
    return Rows(slots_TK, assigned_KE, counts_E, dropped_K, row_of_TK, source_of_R, token_of_R, tiles)


def _parts(counts: Tensor, top_k: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the buffer of all small results into views: assigned_KE, counts_E, dropped_K, tiles."""
    sizes = top_k * num_experts, num_experts, top_k
    assigned, counts_E, dropped_K, tiles = counts.split_with_sizes((*sizes, counts.shape[0] - sum(sizes)))
    return assigned.view(top_k, num_experts), counts_E, dropped_K, tiles


def _fake_place_assignments(
    ids_TK: Tensor, asked_TK: Any, order_N: Any, limit: Any, num_experts: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
    num_tokens, top_k = ids_TK.shape
    size = num_tokens * top_k
    tiles = table_start(size, num_experts, 2 * BLOCKS_M[-1])
    return (
        ids_TK.new_empty(num_tokens, top_k),
        ids_TK.new_empty(num_tokens, top_k),
        ids_TK.new_empty(size),
        None if top_k == 1 else ids_TK.new_empty(size),
        ids_TK.new_empty((top_k + 1) * num_experts + top_k + tiles),
    )


@opaque(_fake_place_assignments)
def place_assignments(
    ids_TK: Tensor,
    asked_TK: Tensor | None,
    order_N: Tensor | None,
    limit: Tensor | None,
    num_experts: int,
    time: int,
    batch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of `assign_rows`, with `time` and `batch` in place of its `time_first`.

    Return slots_TK, row_of_TK, source_of_R, token_of_R, and a buffer that `_parts` splits. For K = 1,
    token_of_R is None, or empty under torch.compile. `time` is the number of time steps if token t is
    (t // batch, t % batch), or 1 if `time_first` is None. `batch` is T / time.
    """
    found = _fake_place_assignments(ids_TK, asked_TK, order_N, limit, num_experts)
    slots_TK, row_of_TK, source_of_R, token_of_R, counts = found
    num_tokens, top_k = ids_TK.shape
    if num_tokens == 0:
        counts.zero_()
        return found
    ids_TK = ids_TK.contiguous()
    asked = None if asked_TK is None else asked_TK.contiguous().view(torch.uint8)
    sizes = num_tokens, top_k, num_experts, time, batch
    starts_BE, plan = _block_starts(ids_TK, asked, None, sizes, counts, limit)
    if order_N is not None:
        order_N = order_N.contiguous()
        # In the given order, a block can mix choices, so only the call above can count each choice.
        del starts_BE  # frees memory for the next tensor
        starts_BE, plan = _block_starts(ids_TK, asked, order_N, sizes, counts, limit)
    launch(
        plan,
        ids_TK.device,
        ids_TK,
        asked,
        order_N,
        limit,
        starts_BE,
        counts,
        slots_TK,
        row_of_TK,
        source_of_R,
        token_of_R,
    )
    if limit is not None:
        torch.sum(slots_TK >= limit, dim=0, out=_parts(counts, top_k, num_experts)[2])
    return found


def _block_starts(
    ids_TK: Tensor,
    asked: Tensor | None,
    order_N: Tensor | None,
    sizes: tuple[int, ...],
    counts: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Plan]:
    """Return each expert's number of assignments before each block, and write the totals to `counts`.

    A chain is the T assignments of one choice, or all N assignments if an order is given. Blocks are parts
    of a chain. The results are starts_BE, [chains * blocks, E] int32, and the plan of `_place_kernel`.
    """
    count, scan, place = _plans(sizes, order_N is not None)
    starts_BE = ids_TK.new_empty(count.grid[0], sizes[2], dtype=torch.int32)
    launch(count, ids_TK.device, ids_TK, asked, order_N, starts_BE)
    launch(scan, ids_TK.device, starts_BE, counts, limit)
    return starts_BE, place


@functools.lru_cache(maxsize=1024)
def _plans(sizes: tuple[int, ...], has_order: bool) -> tuple[Plan, Plan, Plan]:
    """Return the plans of the count, scan and place kernels for the sizes (T, K, E, time, batch)."""
    num_tokens, top_k, num_experts, *_ = sizes
    chains, length = (1, top_k * num_tokens) if has_order else (top_k, num_tokens)
    num_blocks = cdiv(length, BLOCK_N)
    programs, numbers = chains * num_blocks, (num_blocks, length, *sizes)
    blocks = {"BLOCK": BLOCK_N, "BLOCK_E": COUNT_BLOCK_E}
    scan = {"HAS_ORDER": has_order, "BLOCK_B": SCAN_BLOCK_B, "BLOCK_E": SCAN_BLOCK_E}
    scan_grid = (cdiv(num_experts, SCAN_BLOCK_E),)
    place_grid = (programs + tile_programs(num_tokens * top_k, num_experts),)
    return (
        Plan(_count_kernel, (programs, cdiv(num_experts, COUNT_BLOCK_E)), numbers, blocks),
        Plan(_scan_kernel, scan_grid, (chains, num_blocks, top_k, num_experts), scan),
        Plan(_place_kernel, place_grid, (programs, *numbers), {**blocks, "PEERS": PEERS, **CONSTANTS}),
    )


@triton.jit
def _assignments_at(
    ids,
    asked,
    order,
    chain,
    positions,
    sizes,
):
    """Return the assignments t * K + j at these positions, and their experts; E means no expert."""
    length, num_tokens, top_k, num_experts, time, batch = sizes
    inside = positions < length
    if order is not None:
        # Divisions of 64 bits would spill scalar registers on AMD.
        n = tl.load(order + positions, mask=inside, other=0).to(tl.int32)
        tokens, choices = (n % num_tokens).to(tl.int64), n // num_tokens
    else:
        tokens, choices = (positions % time * batch + positions // time).to(tl.int64), chain
    sources = tokens * top_k + choices
    wanted = inside
    if asked is not None:
        wanted = inside & (tl.load(asked + sources, mask=inside, other=0) != 0)
    # Comparing 32-bit numbers needs half as many instructions as comparing 64-bit numbers.
    return sources, tl.load(ids + sources, mask=wanted, other=num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks", "length", "num_tokens", "time", "batch"])
def _count_kernel(
    ids,
    asked,
    order,
    starts,
    num_blocks,
    length,
    num_tokens,
    top_k,
    num_experts,
    time,
    batch,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    positions = block % num_blocks * BLOCK + tl.arange(0, BLOCK)
    _, own = _assignments_at(
        ids, asked, order, block // num_blocks, positions,
        (length, num_tokens, top_k, num_experts, time, batch),
    )  # fmt: skip
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = tl.sum((own[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(starts + block.to(tl.int64) * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["chains", "num_blocks"])
def _scan_kernel(
    starts,
    results,
    limit,
    chains,
    num_blocks,
    top_k,
    num_experts,
    HAS_ORDER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Replace each block's count of each expert by the sum over all earlier blocks; write the totals."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = experts < num_experts
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for chain in range(chains):
        before_chain = before
        for first in range(0, num_blocks, BLOCK_B):
            blocks = first + tl.arange(0, BLOCK_B)
            rows = (chain * num_blocks + blocks).to(tl.int64)
            cells = rows[:, None] * num_experts + experts[None, :]
            mask = (blocks < num_blocks)[:, None] & inside[None, :]
            counts = tl.load(starts + cells, mask=mask, other=0)
            earlier = tl.cumsum(counts, axis=0) - counts
            tl.store(starts + cells, before[None, :] + earlier, mask=mask)
            before += tl.sum(counts, axis=0)
        if not HAS_ORDER:
            tl.store(results + chain * num_experts + experts, before - before_chain, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(results + (top_k + 1) * num_experts + chain, 0)
    rows = before.to(tl.int64)
    if limit is not None:
        rows = tl.minimum(rows, tl.load(limit))
    tl.store(results + top_k * num_experts + experts, rows, mask=inside)


@triton.jit(do_not_specialize=["programs", "num_blocks", "length", "num_tokens", "time", "batch"])
def _place_kernel(
    ids,
    asked,
    order,
    limit,
    starts,
    results,
    slots_out,
    row_of,
    source_of,
    token_of,
    programs,
    num_blocks,
    length,
    num_tokens,
    top_k,
    num_experts,
    time,
    batch,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PEERS: tl.constexpr,
    SIZES: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILES_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    block = tl.program_id(0)
    kept = results + top_k * num_experts  # each expert's number of rows
    if block >= programs:  # the remaining programs write the tables of row tiles
        num_rows, tiles = num_tokens * top_k, kept + num_experts + top_k
        write_tiles(block - programs, kept, tiles, num_rows, num_experts, SIZES, SMALLEST, TILES_E, BLOCK_T)
        return
    chain, first = block // num_blocks, block % num_blocks * BLOCK
    positions = first + tl.arange(0, BLOCK)
    sizes = (length, num_tokens, top_k, num_experts, time, batch)
    sources, own = _assignments_at(ids, asked, order, chain, positions, sizes)
    has_slot = own < num_experts
    slots = tl.load(starts + block.to(tl.int64) * num_experts + own, mask=has_slot, other=0)
    for shift in range(0, BLOCK, PEERS):
        peers = first + shift + tl.arange(0, PEERS)
        _, theirs = _assignments_at(ids, asked, order, chain, peers, sizes)
        before = (own[:, None] == theirs[None, :]) & (peers[None, :] < positions[:, None])
        slots += tl.sum(before.to(tl.int32), axis=1)
    offsets = tl.zeros([BLOCK], dtype=tl.int32)  # for each assignment, the first row of its expert
    total = tl.zeros([], dtype=tl.int32)
    for first_expert in range(0, num_experts, BLOCK_E):
        experts = first_expert + tl.arange(0, BLOCK_E)
        rows = tl.load(kept + experts, mask=experts < num_experts, other=0).to(tl.int32)
        offsets += tl.sum(tl.where(experts[None, :] < own[:, None], rows[None, :], 0), axis=1)
        total += tl.sum(rows, axis=0)
    has_row = has_slot
    if limit is not None:
        has_row = has_slot & (slots < tl.load(limit))
    inside = positions < length
    tl.store(slots_out + sources, tl.where(has_slot, slots, -1), mask=inside)
    tl.store(row_of + sources, tl.where(has_row, offsets + slots, -1), mask=inside)
    rows = (offsets + slots).to(tl.int64)
    tl.store(source_of + rows, sources, mask=has_row)
    # Each program also writes -1 to its part of the unused rows at the end.
    unused = (chain * length + positions).to(tl.int64)
    is_unused = inside & (unused >= total)
    tl.store(source_of + unused, -1, mask=is_unused)
    if token_of is not None:
        tl.store(token_of + rows, sources // top_k, mask=has_row)
        tl.store(token_of + unused, -1, mask=is_unused)
