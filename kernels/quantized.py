"""Products of rows with a quantized matrix on a CPU, without a copy of the matrix in a wider dtype.

Few rows use torch's kernels, which read the stored integers. These kernels take rows in bf16, add the
products in fp32, and round the results to bf16. For more rows, blocks of the matrix are converted to bf16
and multiplied while they are in the cache. On a CPU without these kernels, blocks are converted to fp32.

O and I are the output and input dimensions of the matrix, n the number of rows, G the number of groups of a
row, and b the number of blocks of an int4 matrix.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 64  # input dimensions that share a scale in an int4 matrix
BLOCK = 64  # output dimensions that are stored together in an int4 matrix
ZERO = 8  # the nibble of an int4 value of 0
# Up to this number of rows, torch's kernel is faster than the conversion of blocks. Measured on one core of
# an AMD EPYC with AVX-512 and bf16 instructions, in ms, for a matrix [8192, 2048]. int8: 14 vs. 19 for 8
# rows, 61 vs. 26 for 32 rows. int4: 33 vs. 59 for 32 rows, 102 vs. 86 for 128 rows.
MOST_ROWS = {"int8": 16, "int4": 64}
# The int8 kernel reads this number of input dimensions at a time. With unaligned addresses it would crash
# or give wrong results.
LANES, ALIGNMENT = 16, 16
CONVERTED = 2**19  # values of a matrix that are converted at a time


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix [O, I], which linear maps take in place of a tensor.

    Attributes:
        values: [O, I] int8, or [O / 64, I, 32] uint8 for int4; `packed_int4` describes this layout.
        scales: [O] fp32 for int8; [G, O] bf16 for int4.
        dtype: the dtype of the tensor that the matrix replaces; rows have this dtype.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> "QuantizedMatrix":
        """Return the matrix for rows of another dtype; the stored values stay as they are."""
        return replace(self, dtype=dtype)

    def linear(self, x_nI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ matrix.T + bias, [n, O] in the dtype of x.

        If torch has a kernel for such matrices, x, the result and converted blocks of int4 are rounded to
        bf16, each with a relative error of at most 2**-8. The relative error of the norm is about 0.3 %.
        """
        kind = "int8" if self.values.dtype == torch.int8 else "int4"
        in_bf16 = has_kernel(kind)
        x_nI, dtype = x_nI.to(torch.bfloat16 if in_bf16 else torch.float32).contiguous(), x_nI.dtype
        is_few = in_bf16 and 0 < len(x_nI) <= MOST_ROWS[kind]
        by_kernel = is_few and x_nI.shape[1] % LANES == 0 and _is_aligned(x_nI, self.values)
        y_nO = PRODUCTS[kind][0 if by_kernel else 1](x_nI, self.values, self.scales)
        if bias_O is not None:
            y_nO += bias_O
        return y_nO.to(dtype)


@functools.cache
def has_kernel(kind: str) -> bool:
    """Return whether torch has a correct kernel for int8 or int4 matrices in this layout on this CPU.

    The layout of int4 differs between CPUs: torch reads the layout of `packed_int4` with AVX-512 only.
    """
    values_OI = torch.arange(128 * 192, dtype=torch.int32).view(128, 192) % 251 % 16
    x_nI = torch.arange(3 * 192.0).view(3, 192) % 7
    values, scales = values_OI.to(torch.int8), torch.arange(1.0, 129.0)
    if kind == "int4":
        values, scales = packed_int4(values_OI), scales.repeat(3, 1).bfloat16()
    by_kernel, by_blocks = PRODUCTS[kind]
    try:
        found, expected = by_kernel(x_nI.bfloat16(), values, scales), by_blocks(x_nI, values, scales)
    except (AttributeError, RuntimeError):
        return False
    return bool((found - expected).norm() < 0.01 * expected.norm())


def _is_aligned(x_nI: Tensor, values: Tensor) -> bool:
    """Return whether the kernels can read each row of x and of an int8 matrix with aligned loads."""
    return x_nI.data_ptr() % (ALIGNMENT * x_nI.itemsize) == 0 == values.data_ptr() % ALIGNMENT


def packed_int4(nibbles_OI: Tensor) -> Tensor:
    """Return integers from 0 to 15 as bytes [O / 64, I, 32] uint8; O is a multiple of 64.

    Byte [b, i, j] has row 64 b + j of column i in its low nibble, and row 64 b + 32 + j in its high nibble.
    """
    low, high = nibbles_OI.to(torch.uint8).view(-1, 2, BLOCK // 2, nibbles_OI.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()


def unpacked_int4(values: Tensor, scales_GO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return some blocks [b, I, 32] of an int4 matrix as numbers, transposed: [b, I, 64]."""
    blocks, in_dim, half = values.shape
    wide = values.new_empty(blocks, in_dim, 2 * half, dtype=dtype)
    wide[..., :half] = values & 15
    wide[..., half:] = values >> 4
    wide -= ZERO
    scales = scales_GO.view(-1, blocks, 1, BLOCK).transpose(0, 1).to(dtype)
    wide.view(blocks, -1, GROUP, BLOCK).mul_(scales)
    return wide


# In the following products, x is bf16 or fp32, and the result is fp32.


def _int8_by_kernel(x_nI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    # The kernel would round the scales to bf16.
    ones_O = torch.ones(len(values_OI), dtype=x_nI.dtype)
    return torch._weight_int8pack_mm(x_nI, values_OI, ones_O).float().mul_(scales_O)


def _int8_by_blocks(x_nI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    rows = max(1, CONVERTED // values_OI.shape[1])
    out_nO = x_nI.new_empty(len(x_nI), len(values_OI))
    for values_oI, out_no in zip(values_OI.split(rows), out_nO.split(rows, dim=1), strict=True):
        out_no.copy_(x_nI @ values_oI.to(x_nI.dtype).t())
    return out_nO.float().mul_(scales_O)


def _int4_by_kernel(x_nI: Tensor, values: Tensor, scales_GO: Tensor) -> Tensor:
    # Pairs of a scale and 0 have the bits of the scale as an integer of twice the width.
    pairs = scales_GO.view(torch.uint16).to(torch.int32).view(x_nI.dtype).view(*scales_GO.shape, 2)
    packed = values.view(scales_GO.shape[1], -1)
    return torch._weight_int4pack_mm_for_cpu(x_nI, packed, GROUP, pairs).float()


def _int4_by_blocks(x_nI: Tensor, values: Tensor, scales_GO: Tensor) -> Tensor:
    count = max(1, CONVERTED // (BLOCK * values.shape[1]))
    out = x_nI.new_empty(len(x_nI), len(values), BLOCK)
    parts = zip(
        values.split(count), scales_GO.split(count * BLOCK, dim=1), out.split(count, dim=1), strict=True
    )
    for part, scales_Go, part_out in parts:
        part_out.copy_((x_nI @ unpacked_int4(part, scales_Go, x_nI.dtype)).transpose(0, 1))
    return out.view(len(x_nI), scales_GO.shape[1]).float()


# For each kind of matrix: a product by torch's kernel, and a product by converted blocks.
PRODUCTS = {"int8": (_int8_by_kernel, _int8_by_blocks), "int4": (_int4_by_kernel, _int4_by_blocks)}
