"""Loads the two operands of one row tile's matrix product: the rows and the expert's weight.

With an index map, the rows of a tile are gathered. An operand is loaded with its tensor descriptor (TMA),
or through pointers if there is no descriptor. A weight's descriptor has three dimensions, so that no tile
reads from the next expert. Addresses are int64.
"""

import triton
import triton.language as tl


@triton.jit
def rows_operand(rows, index, first, end, K, DESCRIPTOR: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the operand of `load_rows`: a tensor descriptor, or pointers to the rows."""
    if DESCRIPTOR:
        operand = rows
    else:
        r = first + tl.arange(0, BLOCK_M)
        r = tl.where(r < end, r, first)  # Rows from `end` on become row `first`, so loads need no mask.
        if index is not None:
            # In a tile after the last group of rows, index[r] may be -1, but these rows are never loaded.
            r = tl.load(index + r).to(tl.int64)
        operand = rows + (r * K)[:, None]
    return operand


@triton.jit
def load_rows(operand, first, k, K, DESCRIPTOR: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the tile [BLOCK_M, BLOCK_K] of the rows at column k. Columns from K on are zeros."""
    if DESCRIPTOR:
        tile = operand.load([first.to(tl.int32), k])
    else:
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        tile = tl.load(operand + columns, mask=columns < K, other=0.0)
    return tile


@triton.jit
def load_weight(
    weight,
    strides,
    expert,
    n,
    k,
    N,
    K,
    DESCRIPTOR: tl.constexpr,
    K_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load the tile [BLOCK_K, BLOCK_N] of weight[expert].T at (k, n). Elements outside the weight are 0.

    `strides` are the strides of (expert, n, k). The descriptor has the dimensions (expert, N, K) if K_INNER
    is set, otherwise (expert, K, N).
    """
    if DESCRIPTOR and K_INNER:
        tile = weight.load([expert.to(tl.int32), n, k]).reshape(BLOCK_N, BLOCK_K).T
    elif DESCRIPTOR:
        tile = weight.load([expert.to(tl.int32), k, n]).reshape(BLOCK_K, BLOCK_N)
    else:
        rows = k + tl.arange(0, BLOCK_K)[:, None]
        columns = n + tl.arange(0, BLOCK_N)[None, :]
        offset = rows.to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[1]
        inside = (rows < K) & (columns < N)
        tile = tl.load(weight + expert * strides[0] + offset, mask=inside, other=0.0)
    return tile


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """Return total + a @ b for two tiles a and b. The product has the given precision."""
    if PRECISION == "interpreted":  # The interpreter uses NumPy, which does not have bf16.
        a, b = a.to(total.dtype), b.to(total.dtype)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def add_product(
    total,
    rows,
    weight,
    strides,
    tile,
    sizes,
    PRECISION: tl.constexpr,
    ROWS_DESCRIPTOR: tl.constexpr,
    WEIGHT_DESCRIPTOR: tl.constexpr,
    K_INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the product rows @ weight[expert].T to a tile's sum `total`. Expert -1 adds nothing.

    `tile` is (expert, first row, end of the expert's rows, first column n), and `sizes` is (N, K).
    """
    expert, first, end, n = tile
    N, K = sizes
    rows_from = rows_operand(rows, None, first, end, K, ROWS_DESCRIPTOR, total.shape[0])
    for k in range(0, tl.where(expert < 0, 0, K), BLOCK_K):
        a = load_rows(rows_from, first, k, K, ROWS_DESCRIPTOR, BLOCK_K)
        w = load_weight(
            weight, strides, expert, n, k, N, K, WEIGHT_DESCRIPTOR, K_INNER, total.shape[1], BLOCK_K
        )
        total = multiply(a, w, total, PRECISION)
    return total


@triton.jit
def load_bias(bias, expert, columns, N):
    """Load an expert's bias at the given columns. Columns from N on and the bias of expert -1 are 0."""
    last = tl.where(expert < 0, 0, N)
    return tl.load(bias + expert * N + columns, mask=columns < last, other=0.0)


@triton.jit
def tile_offsets(N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the offsets of a tile's elements from its first element, as int32 to save registers."""
    return tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def tile_mask(first, end, n, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the mask of a tile's elements inside the matrix, which are before row `end` and column N."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    return (rows < end - first)[:, None] & (columns < N - n)[None, :]


@triton.jit
def load_tile(x, first, end, n, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the tile of x [R, N] at (first, n). Rows from `end` on and columns from N on are zeros."""
    inside = tile_mask(first, end, n, N, BLOCK_M, BLOCK_N)
    return tl.load(x + first * N + n + tile_offsets(N, BLOCK_M, BLOCK_N), mask=inside, other=0.0)


@triton.jit
def store_tile(x, values, first, end, n, N):
    """Write a tile to x [R, N] at (first, n), without the rows from `end` on and the columns from N on."""
    inside = tile_mask(first, end, n, N, values.shape[0], values.shape[1])
    offsets = tile_offsets(N, values.shape[0], values.shape[1])
    tl.store(x + first * N + n + offsets, values, mask=inside)
