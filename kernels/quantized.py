"""Products of rows with a quantized matrix on a CPU, without a copy of the matrix in a wider dtype.

For few rows, torch's kernels read the stored integers. torch's kernels take rows in bf16, add the products
in fp32, and round the results to bf16. For more rows, blocks of the matrix are converted to bf16 and
multiplied while the blocks are in the cache. On CPUs for which torch has no kernel, blocks become fp32.

O and I are the output and input dimensions of the matrix. n is the number of rows, G the number of groups
in a row of the matrix, and b the number of blocks of an int4 matrix.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 64  # This many input dimensions of an int4 matrix share a scale.
BLOCK = 64  # This many output dimensions of an int4 matrix are stored together.
ZERO = 8  # The nibble (4 bits) that stores the int4 value 0.
# Up to this number of rows, torch's kernel is faster than converting the matrix to bf16 in blocks. The
# times are for a matrix [8192, 2048] on one core of an AMD EPYC with AVX-512 and bf16 instructions. With
# int8, torch's kernel took 14 ms for 8 rows and 61 ms for 32 rows; converting took 19 and 26 ms. With int4,
# torch's kernel took 33 ms for 32 rows and 102 ms for 128 rows; converting took 59 and 86 ms.
MOST_ROWS = {"int8": 16, "int4": 64}
# torch's int8 kernel reads LANES input dimensions at a time. It can crash or give wrong results if the rows
# or the matrix do not start at a multiple of ALIGNMENT elements in memory.
LANES, ALIGNMENT = 16, 16
CONVERTED = 2**19  # This many values of a matrix are converted at a time.


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix [O, I], which linear maps accept in place of a tensor.

    Attributes:
        values: [O, I] int8, or [O / 64, I, 32] uint8 for int4; `packed_int4` describes this layout.
        scales: [O] fp32 for int8; [G, O] bf16 for int4.
        dtype: the dtype of the tensor that the matrix replaces; rows have this dtype.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> "QuantizedMatrix":
        """Return the quantized matrix for rows of another dtype. The stored values stay the same."""
        return replace(self, dtype=dtype)

    def linear(self, x_nI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ matrix.T + bias, with shape [n, O] and the dtype of x.

        If torch has a kernel for this kind of matrix, this method rounds x, the result and converted int4
        blocks to bf16. The norm of the rounding error is then about 0.3 % of the result's norm.
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

    torch's int4 layout differs between CPUs. Only with AVX-512 does torch read the layout of `packed_int4`.
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
    """Return whether torch's kernel can read each row of x and of an int8 matrix with aligned loads."""
    return x_nI.data_ptr() % (ALIGNMENT * x_nI.itemsize) == 0 == values.data_ptr() % ALIGNMENT


def packed_int4(nibbles_OI: Tensor) -> Tensor:
    """Pack integers from 0 to 15 into bytes [O / 64, I, 32] uint8, where O is a multiple of 64.

    Byte [b, i, j] has row 64 b + j of column i in its low 4 bits, and row 64 b + 32 + j in its high 4 bits.
    """
    low, high = nibbles_OI.to(torch.uint8).view(-1, 2, BLOCK // 2, nibbles_OI.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()


def unpacked_int4(values: Tensor, scales_GO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert blocks [b, I, 32] of an int4 matrix to scaled values, in transposed blocks [b, I, 64]."""
    blocks, in_dim, half = values.shape
    wide = values.new_empty(blocks, in_dim, 2 * half, dtype=dtype)
    wide[..., :half] = values & 15
    wide[..., half:] = values >> 4
    wide -= ZERO
    scales = scales_GO.view(-1, blocks, 1, BLOCK).transpose(0, 1).to(dtype)
    wide.view(blocks, -1, GROUP, BLOCK).mul_(scales)
    return wide


def _int8_by_kernel(x_nI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    # The scales are applied to the result, because torch's kernel would round the scales to bf16.
    ones_O = torch.ones(len(values_OI), dtype=x_nI.dtype)
    return torch._weight_int8pack_mm(x_nI, values_OI, ones_O).float().mul_(scales_O)


def _int8_by_blocks(x_nI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    rows = max(1, CONVERTED // values_OI.shape[1])
    out_nO = x_nI.new_empty(len(x_nI), len(values_OI))
    for values_oI, out_no in zip(values_OI.split(rows), out_nO.split(rows, dim=1), strict=True):
        out_no.copy_(x_nI @ values_oI.to(x_nI.dtype).t())
    return out_nO.float().mul_(scales_O)


def _int4_by_kernel(x_nI: Tensor, values: Tensor, scales_GO: Tensor) -> Tensor:
    # torch's kernel reads pairs (scale, offset). A scale's bits as int32, viewed as bf16, are (scale, 0).
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


# For each kind of matrix, the function that uses torch's kernel and the function that converts blocks.
PRODUCTS = {"int8": (_int8_by_kernel, _int8_by_blocks), "int4": (_int4_by_kernel, _int4_by_blocks)}
