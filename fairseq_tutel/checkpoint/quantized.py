"""Converts experts' tensors to bf16, or quantizes them to int8 or int4.

A row is a vector along the last dimension. A tensor [..., W] with R rows is stored in one of four formats:

- In bf16, the values are stored without scales.
- In int8, R scales in float32 come first, and then R rows of W bytes. A value is scale * byte.
- In int4, R scales in float32 come first, and then R rows of ceil(W / 2) bytes. A value is scale * (nibble
  - 8). The low nibbles hold the first half of a row, and the high nibbles the second half, padded with 8.
- In int4 with groups, one bfloat16 scale per group of 64 values of a row comes first, and then the nibbles
  in the order of `packed_int4`. This format is for a matrix [R, W] in which R and W are multiples of 64.

The scale of a row is the row's largest magnitude, divided by 127 (int8) or 7 (int4). The scale of a group
is its value of largest magnitude, divided by -8 or -9, whichever gives the smaller squared error. In all
formats, a value of 0 stays 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.options import EXPERT_DTYPES as EXPERT_DTYPES
from fairseq_tutel.kernels.quantized import BLOCK, GROUP, ZERO, QuantizedMatrix, packed_int4, unpacked_int4

LARGEST = {"int8": 127, "int4": 7}
# A group's value of largest magnitude is divided by each number; the better quotient is the scale.
CANDIDATES = (-8.0, -9.0)
ROW_BLOCK = 2**18  # The approximate number of values in a block of rows.


@dataclass(frozen=True)
class Quantized:
    """Describes how an expert's tensor is stored in bf16, int8 or int4."""

    expert_dtype: str  # The stored dtype is one of EXPERT_DTYPES.
    shape: tuple[int, ...]  # The shape of the tensor before quantization.
    dtype: torch.dtype  # The dtype of the tensor before quantization.
    in_rows: bool = False  # True for older files, whose int4 tensors have one scale per row.

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of a stored tensor; int8 and int4 tensors are stored as bytes."""
        if self.expert_dtype == "bf16":
            return torch.bfloat16, self.shape
        return torch.uint8, (self.scale_bytes + self._num_rows * self._row_bytes,)

    @property
    def in_groups(self) -> bool:
        """Whether the format is int4 with one scale per group of 64 values."""
        fits = len(self.shape) == 2 and self.shape[0] % BLOCK == 0 and self.shape[1] % GROUP == 0
        return self.expert_dtype == "int4" and fits and not self.in_rows

    @property
    def _num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def _row_bytes(self) -> int:
        width = self.shape[-1]
        return width if self.expert_dtype == "int8" else -(-width // 2)

    @property
    def scale_bytes(self) -> int:
        """The number of bytes of all scales, which are stored before the quantized values."""
        return self._num_rows * (2 * (self.shape[-1] // GROUP) if self.in_groups else 4)

    def quantize(self, values: Tensor) -> Tensor:
        """Quantize a tensor and return the tensor to store; raise ValueError if a value is not finite."""
        if self.expert_dtype == "bf16":
            return values.to(torch.bfloat16)
        values_RW = values.detach().reshape(-1, self.shape[-1])
        if self.in_groups:
            scales, rows = zip(*map(_quantized_groups, _row_blocks(values_RW, BLOCK)), strict=True)
            return torch.cat([torch.cat(scales).t().contiguous().view(torch.uint8).flatten(), *rows])
        scales, rows = zip(*map(self._quantized_rows, _row_blocks(values_RW)), strict=True)
        return torch.cat([*scales, *rows])

    def _quantized_rows(self, values_RW: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize rows, and return the bytes of the scales and the bytes of the quantized values."""
        largest, values_RW = LARGEST[self.expert_dtype], values_RW.float()
        scales_R1 = _finite(values_RW.abs().amax(1, keepdim=True) / largest)
        whole_RW = (values_RW / scales_R1.masked_fill(scales_R1 == 0, 1)).round_()
        whole_RW.clamp_(-largest, largest)
        return scales_R1.view(-1).view(torch.uint8), self._bytes(whole_RW).flatten()

    def _bytes(self, whole_RW: Tensor) -> Tensor:
        if self.expert_dtype == "int8":
            return whole_RW.to(torch.int8).view(torch.uint8)
        half = self._row_bytes
        nibbles_RW = torch.full((len(whole_RW), 2 * half), ZERO, dtype=torch.uint8)
        nibbles_RW[:, : self.shape[-1]] = (whole_RW + ZERO).to(torch.uint8)
        return nibbles_RW[:, :half] | nibbles_RW[:, half:] << 4

    def matrix(self, stored: Tensor, dtype: torch.dtype) -> QuantizedMatrix | None:
        """Return stored int8 or int4 values as a matrix for products in `dtype`; None if unsupported."""
        has_products = self.in_groups or (self.expert_dtype == "int8" and len(self.shape) == 2)
        if not has_products or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        return self._matrix(stored, dtype)

    def _matrix(self, stored: Tensor, dtype: torch.dtype) -> QuantizedMatrix:
        scales, values = stored.tensor_split((self.scale_bytes,))
        if self.expert_dtype == "int8":
            whole_RW = values.view(torch.int8).view(self._num_rows, self.shape[-1])
            return QuantizedMatrix(whole_RW, scales.view(torch.float32), dtype)
        num_rows, width = self.shape
        packed = values.view(num_rows // BLOCK, width, BLOCK // 2)
        return QuantizedMatrix(packed, scales.view(torch.bfloat16).view(-1, num_rows), dtype)

    def dequantize(self, stored: Tensor, out: Tensor | None = None) -> Tensor:
        """Dequantize a stored tensor, and round it to its original dtype; write into `out` if given."""
        out = stored.new_empty(self.shape, dtype=self.dtype) if out is None else out
        if self.expert_dtype == "bf16":
            return out.copy_(stored)
        if stored.storage_offset() % 4:  # A tensor in a mapped file may be unaligned.
            stored = stored.clone()
        if self.in_groups:
            matrix, out_BbW = self._matrix(stored, torch.float32), out.view(-1, BLOCK, self.shape[1])
            scales = matrix.scales.split(BLOCK, dim=1)
            for part, scales_Gb, out_bW in zip(matrix.values.split(1), scales, out_BbW, strict=True):
                out_bW.copy_(unpacked_int4(part, scales_Gb)[0].t())
            return out
        num_rows, width, row_bytes = self._num_rows, self.shape[-1], self._row_bytes
        scales_R1 = stored[: self.scale_bytes].view(torch.float32).unsqueeze(1)
        bytes_RB = stored[self.scale_bytes :].view(num_rows, row_bytes)
        is_wide = self.dtype == torch.float32
        wide_RW = (out if is_wide else out.float()).view(num_rows, width)
        if self.expert_dtype == "int8":
            wide_RW.copy_(bytes_RB.view(torch.int8))
        else:
            wide_RW[:, :row_bytes] = bytes_RB & 15
            wide_RW[:, row_bytes:] = bytes_RB[:, : width - row_bytes] >> 4
            wide_RW -= ZERO
        wide_RW *= scales_R1
        return out if is_wide else out.copy_(wide_RW.view(self.shape))


def _quantized_groups(values_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to int4 in groups; return the scales [R, W / 64] and the bytes of the values."""
    values_RGg = values_RW.float().view(len(values_RW), -1, GROUP)
    largest_RG1 = values_RGg.gather(2, values_RGg.abs().argmax(2, keepdim=True))
    best = _finite((largest_RG1 / CANDIDATES[0]).bfloat16())
    whole, least = _rounded(values_RGg, best)
    for number in CANDIDATES[1:]:
        scales = (largest_RG1 / number).bfloat16()
        other, error = _rounded(values_RGg, scales)
        is_better = error < least
        best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
        whole = torch.where(is_better, other, whole)
    return best.squeeze(2), packed_int4(whole.view_as(values_RW) + ZERO).flatten()


def _finite(scales: Tensor) -> Tensor:
    """Return scales of a quantized tensor unchanged, or raise ValueError if a scale is not finite."""
    if not scales.isfinite().all():
        raise ValueError("the tensor has values that are not finite")
    return scales


def _rounded(values_RGg: Tensor, scales_RG1: Tensor) -> tuple[Tensor, Tensor]:
    """Return values / scales, rounded to -8 … 7, and the squared error of each group [R, G, 1]."""
    scales_RG1 = scales_RG1.float()
    whole_RGg = (values_RGg / scales_RG1.masked_fill(scales_RG1 == 0, 1)).round_().clamp_(-ZERO, ZERO - 1)
    return whole_RGg, torch.addcmul(values_RGg, whole_RGg, scales_RG1, value=-1).square_().sum(2, True)


def _row_blocks(values_RW: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Split a matrix into row blocks of about ROW_BLOCK values, which limits the memory of temporaries."""
    rows = ROW_BLOCK // max(1, values_RW.shape[1])
    return values_RW.split(max(multiple, rows // multiple * multiple))


def quantized_form(
    expert_dtype: str, shape: tuple[int, ...], dtype: torch.dtype, in_rows: bool = False
) -> Quantized | None:
    """Return the format to which an expert's tensor is quantized, or None for biases and integers."""
    if not expert_dtype or len(shape) < 2 or not dtype.is_floating_point:
        return None
    return Quantized(expert_dtype, shape, dtype, in_rows)


@dataclass
class RoundingError:
    """Accumulates the quantization error over several tensors."""

    worst_row: float = 0.0  # The largest relative error of a row: norm of errors / norm of values.
    differences: float = 0.0  # The sum of squared quantization errors.
    squares: float = 0.0  # The sum of squared values of the tensors.

    @property
    def relative(self) -> float:
        """The root mean square of the quantization errors, divided by that of the values."""
        return math.sqrt(self.differences / self.squares) if self.squares else 0.0

    def add(self, values: Tensor, rounded: Tensor) -> None:
        """Add the quantization errors `rounded` - `values` of a tensor [..., W], in float64."""
        blocks = (_row_blocks(x.detach().flatten(0, -2)) for x in (values, rounded))
        for values_RW, rounded_RW in zip(*blocks, strict=True):
            squares_R = values_RW.double().square_().sum(1)
            differences_R = (rounded_RW.double() - values_RW).square_().sum(1)
            self.squares += float(squares_R.sum())
            self.differences += float(differences_R.sum())
            rows_R = (differences_R / squares_R.masked_fill(squares_R == 0, 1)).sqrt()
            self.worst_row = max([self.worst_row, *rows_R.tolist()])
