"""Triton kernels that gather rows for dispatch and combine, with the signatures of `reference`.

- The same source runs on CUDA and ROCm.
- One program writes each output element, without atomics, so results are deterministic.
- Sums are computed in fp32 (fp64 for fp64 tensors).
- Addresses are int64, since R * D can exceed 2^31.

T tokens, D model_dim, K top_k, R rows.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import cdiv, next_power_of_2
from fairseq_tutel.kernels.triton_launch import Plan, accumulator_of, contiguous, launch

# The largest number of a row's columns that one program computes. The number is not tuned for speed.
MAX_BLOCK_D = 1024
# The rows and columns that a program of `gather_pair` copies. One H100 copied the rows of layer E of
# benchmarks/layer_cases.py in 0.99 ms, and in 1.13 ms with 32 rows and 256 columns.
PAIR_ROWS, PAIR_COLUMNS = 64, 128


def gather_rows(x_TD: Tensor, index_R: Tensor, scale_R: Tensor | None = None) -> Tensor:
    """Gather rows: rows[r] = scale[r] * x[index[r]], or 0 where index[r] is -1."""
    return gather_sum(x_TD, index_R.unsqueeze(1), None if scale_R is None else scale_R.unsqueeze(1))


def _pair_shapes(x_TD: Tensor, y_TD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    shape = index_R.shape[0], x_TD.shape[1]
    return x_TD.new_empty(shape), x_TD.new_empty(shape)


@opaque(_pair_shapes)
def gather_pair(x_TD: Tensor, y_TD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the same rows of two tensors, which have the same shape and dtype."""
    xs_RD, ys_RD = found = _pair_shapes(x_TD, y_TD, index_R)
    if xs_RD.numel():
        plan = _gather_pair_plan(xs_RD.shape)
        launch(plan, x_TD.device, *contiguous(x_TD, y_TD, index_R), xs_RD, ys_RD)
    return found


@functools.lru_cache(maxsize=1024)
def _gather_pair_plan(shape: tuple[int, ...]) -> Plan:
    num_rows, model_dim = shape
    constants = {"ROWS": PAIR_ROWS, "COLUMNS": PAIR_COLUMNS}
    grid = cdiv(num_rows, PAIR_ROWS), cdiv(model_dim, PAIR_COLUMNS), 2
    return Plan(_gather_pair_kernel, grid, shape, constants)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_pair_kernel(
    x_ptr, y_ptr, index_ptr, xs_ptr, ys_ptr, num_rows, model_dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # The programs of the same columns run together, because the L2 cache holds these columns of all tokens.
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    source = tl.load(index_ptr + r, mask=r < num_rows, other=-1)
    is_kept = (source >= 0)[:, None] & (columns < model_dim)
    is_inside = (r < num_rows)[:, None] & (columns < model_dim)
    read_at = source[:, None] * model_dim + columns
    write_at = r.to(tl.int64)[:, None] * model_dim + columns
    if tl.program_id(2) == 0:
        tl.store(xs_ptr + write_at, tl.load(x_ptr + read_at, mask=is_kept, other=0.0), mask=is_inside)
    else:
        tl.store(ys_ptr + write_at, tl.load(y_ptr + read_at, mask=is_kept, other=0.0), mask=is_inside)


def _fake_gather_sum(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    return rows_RD.new_empty(row_of_TK.shape[0], rows_RD.shape[1])


@opaque(_fake_gather_sum)
def gather_sum(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Sum each token's rows with weights: y[t] = sum over j of weights[t, j] * rows[row_of[t, j]]."""
    y_TD = _fake_gather_sum(rows_RD, row_of_TK)
    if y_TD.numel():
        _launch_gather_sum(rows_RD, row_of_TK, weights_TK, y_TD)
    return y_TD


def _fake_gather_gradients(drows_RD: Tensor, row_of_TK: Tensor, dgate_PR: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_gather_sum(drows_RD, row_of_TK), dgate_PR.new_empty(row_of_TK.shape)


@opaque(_fake_gather_gradients)
def gather_gradients(drows_RD: Tensor, row_of_TK: Tensor, dgate_PR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens (sums over rows) and of gate weights (sums over dgate's P parts)."""
    dx_TD, dweights_TK = _fake_gather_gradients(drows_RD, row_of_TK, dgate_PR)
    if dx_TD.numel():
        _launch_gather_sum(drows_RD, row_of_TK, None, dx_TD, dgate_PR.contiguous(), dweights_TK)
    return dx_TD, dweights_TK


def _launch_gather_sum(
    rows_RD: Tensor,
    row_of_TK: Tensor,
    weights_TK: Tensor | None,
    y_TD: Tensor,
    parts_PR: Tensor | None = None,
    sums_TK: Tensor | None = None,
) -> None:
    num_parts = 0 if parts_PR is None else parts_PR.shape[0]
    launch(
        _gather_sum_plan(row_of_TK.shape, rows_RD.shape, num_parts, rows_RD.dtype),
        rows_RD.device,
        rows_RD.contiguous(),
        row_of_TK.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        y_TD,
        parts_PR,
        sums_TK,
    )


@functools.lru_cache(maxsize=1024)
def _gather_sum_plan(
    map_shape: tuple[int, ...], rows_shape: tuple[int, ...], num_parts: int, dtype: torch.dtype
) -> Plan:
    (num_tokens, top_k), (num_rows, model_dim) = map_shape, rows_shape
    constants = {
        "ACC": accumulator_of(dtype),
        "BLOCK_K": min(next_power_of_2(top_k), 4),
        "BLOCK_D": _block_d(model_dim),
        "BLOCK_P": next_power_of_2(num_parts),
    }
    grid = num_tokens, cdiv(model_dim, constants["BLOCK_D"])
    return Plan(_gather_sum_kernel, grid, (num_parts, num_rows, model_dim, top_k), constants)


def _fake_gather_dot(rows_RD: Tensor, row_of_TK: Tensor, y_TD: Tensor) -> Tensor:
    return rows_RD.new_empty(row_of_TK.shape)


@opaque(_fake_gather_dot)
def gather_dot(rows_RD: Tensor, row_of_TK: Tensor, y_TD: Tensor) -> Tensor:
    """Compute dot products: dots[t, j] = <y[t], rows[row_of[t, j]]>, or 0 where row_of is -1."""
    rows_RD, row_of_TK, y_TD = rows_RD.contiguous(), row_of_TK.contiguous(), y_TD.contiguous()
    dots_TK = _fake_gather_dot(rows_RD, row_of_TK, y_TD)
    if dots_TK.numel() == 0:
        return dots_TK
    plan = _gather_dot_plan(dots_TK.shape, rows_RD.shape[1], rows_RD.dtype)
    launch(plan, rows_RD.device, rows_RD, row_of_TK, y_TD, dots_TK)
    return dots_TK


@functools.lru_cache(maxsize=1024)
def _gather_dot_plan(grid: tuple[int, ...], model_dim: int, dtype: torch.dtype) -> Plan:
    constants = {"ACC": accumulator_of(dtype), "BLOCK_D": _block_d(model_dim)}
    return Plan(_gather_dot_kernel, grid, (model_dim, grid[1]), constants)


def _block_d(model_dim: int) -> int:
    return min(next_power_of_2(model_dim), MAX_BLOCK_D)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _gather_sum_kernel(
    rows_ptr,
    row_of_ptr,
    weights_ptr,
    y_ptr,
    parts_ptr,
    sums_ptr,
    num_parts,
    num_rows,
    model_dim,
    top_k,
    ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < model_dim
    total = tl.zeros([BLOCK_D], dtype=ACC)
    # The inner loop is unrolled, so that BLOCK_K rows are loaded at the same time.
    for first in range(0, top_k, BLOCK_K):
        for offset in tl.static_range(BLOCK_K):
            j = first + offset
            copy = token * top_k + j
            row = tl.load(row_of_ptr + copy, mask=j < top_k, other=-1)
            kept = row >= 0
            end = tl.where(kept, model_dim, 0)
            values = tl.load(rows_ptr + row * model_dim + columns, mask=columns < end, other=0.0)
            values = values.to(ACC)
            if weights_ptr is not None:
                values *= tl.load(weights_ptr + copy, mask=kept, other=0.0).to(ACC)
            total += values
            if parts_ptr is not None:
                parts = tl.arange(0, BLOCK_P)
                at = parts_ptr + parts.to(tl.int64) * num_rows + row
                sums = tl.load(at, mask=parts < tl.where(kept, num_parts, 0), other=0.0)
                is_mine = (tl.program_id(1) == 0) & (j < top_k)
                tl.store(sums_ptr + copy, tl.sum(sums, axis=0), mask=is_mine)
    tl.store(y_ptr + token * model_dim + columns, total, mask=inside)


@triton.jit
def _gather_dot_kernel(
    rows_ptr, row_of_ptr, y_ptr, dots_ptr, model_dim, top_k, ACC: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    copy = token * top_k + tl.program_id(1)
    row = tl.load(row_of_ptr + copy)
    end = tl.where(row >= 0, model_dim, 0)
    total = tl.zeros([BLOCK_D], dtype=ACC)
    for first in range(0, model_dim, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        values = tl.load(rows_ptr + row * model_dim + columns, mask=columns < end, other=0.0)
        y = tl.load(y_ptr + token * model_dim + columns, mask=columns < end, other=0.0)
        total += values.to(ACC) * y.to(ACC)
    tl.store(dots_ptr + copy, tl.sum(total, axis=0))
