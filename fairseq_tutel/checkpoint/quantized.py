"""Converts experts' tensors to bf16, or quantizes them to int8 or int4 with one scale per row.

A row is a vector along the last dimension. A tensor [..., W] with R rows is stored as

    bf16    the values themselves
    int8    R scales in float32, then R rows of W bytes: value = scale * byte, from -127 to 127
    int4    R scales in float32, then R rows of ceil(W / 2) bytes: value = scale * (nibble - 8); the low
            nibbles are the row's first half, the high nibbles its second half, padded with 8

A scale is the row's largest magnitude divided by 127 or 7. Rounding is symmetric and 0 stays 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_tutel.moe.option_table import EXPERT_DTYPES as EXPERT_DTYPES

LARGEST = {"int8": 127, "int4": 7}
SCALE_BYTES = 4
BLOCK = 2**18  # values


@dataclass(frozen=True)
class Quantized:
    """Describes how a tensor is stored in bf16, int8 or int4."""

    expert_dtype: str  # one of EXPERT_DTYPES
    shape: tuple[int, ...]  # before quantization
    dtype: torch.dtype  # before quantization

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of the stored tensor; int8 and int4 are stored as bytes."""
        if self.expert_dtype == "bf16":
            return torch.bfloat16, self.shape
        return torch.uint8, (self._num_rows * (SCALE_BYTES + self._row_bytes),)

    @property
    def _num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def _row_bytes(self) -> int:
        width = self.shape[-1]
        return -(-width // 2) if self.expert_dtype == "int4" else width

    def quantize(self, values: Tensor) -> Tensor:
        """Quantize a tensor and return the tensor to store; raise ValueError if a value is not finite."""
        if self.expert_dtype == "bf16":
            return values.to(torch.bfloat16)
        blocks = _row_blocks(values.detach().reshape(-1, self.shape[-1]))
        scales, rows = zip(*map(self._quantized_rows, blocks), strict=True)
        return torch.cat([*scales, *rows])

    def _quantized_rows(self, values_RW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of the scales and of the values of some rows."""
        largest, values_RW = LARGEST[self.expert_dtype], values_RW.float()
        scales_R1 = values_RW.abs().amax(1, keepdim=True) / largest
        if not scales_R1.isfinite().all():
            raise ValueError("the tensor has values that are not finite")
        whole_RW = (values_RW / scales_R1.masked_fill(scales_R1 == 0, 1)).round_()
        whole_RW.clamp_(-largest, largest)
        return scales_R1.view(-1).view(torch.uint8), self._bytes(whole_RW).flatten()

    def _bytes(self, whole_RW: Tensor) -> Tensor:
        if self.expert_dtype == "int8":
            return whole_RW.to(torch.int8).view(torch.uint8)
        half = self._row_bytes
        nibbles_RW = torch.full((len(whole_RW), 2 * half), 8, dtype=torch.uint8)
        nibbles_RW[:, : self.shape[-1]] = (whole_RW + 8).to(torch.uint8)
        return nibbles_RW[:, :half] | nibbles_RW[:, half:] << 4

    def dequantize(self, stored: Tensor, out: Tensor | None = None) -> Tensor:
        """Dequantize a stored tensor in float32 and round to the dtype; write into `out` if given."""
        out = stored.new_empty(self.shape, dtype=self.dtype) if out is None else out
        if self.expert_dtype == "bf16":
            return out.copy_(stored)
        num_rows, width, row_bytes = self._num_rows, self.shape[-1], self._row_bytes
        scales_R1 = stored[: SCALE_BYTES * num_rows].clone().view(torch.float32).unsqueeze(1)
        bytes_RB = stored[SCALE_BYTES * num_rows :].view(num_rows, row_bytes)
        is_wide = self.dtype == torch.float32
        wide_RW = (out if is_wide else out.float()).view(num_rows, width)
        if self.expert_dtype == "int8":
            wide_RW.copy_(bytes_RB.view(torch.int8))
        else:
            wide_RW[:, :row_bytes] = bytes_RB & 15
            wide_RW[:, row_bytes:] = bytes_RB[:, : width - row_bytes] >> 4
            wide_RW -= 8
        wide_RW *= scales_R1
        return out if is_wide else out.copy_(wide_RW.view(self.shape))


def _row_blocks(values_RW: Tensor) -> tuple[Tensor, ...]:
    """Split a matrix into blocks of rows with about BLOCK values, to limit the memory of temporaries."""
    return values_RW.split(max(1, BLOCK // max(1, values_RW.shape[1])))


def quantized_form(expert_dtype: str, shape: tuple[int, ...], dtype: torch.dtype) -> Quantized | None:
    """Return the format to quantize an expert's tensor; None for biases and integers, which are kept."""
    if not expert_dtype or len(shape) < 2 or not dtype.is_floating_point:
        return None
    return Quantized(expert_dtype, shape, dtype)


@dataclass
class RoundingError:
    """Accumulates the quantization error over several tensors."""

    worst_row: float = 0.0  # largest |difference| / |row|
    differences: float = 0.0  # sum of squares
    squares: float = 0.0  # of the values

    @property
    def relative(self) -> float:
        """The root mean square of the errors, divided by the root mean square of the values."""
        return math.sqrt(self.differences / self.squares) if self.squares else 0.0

    def merge(self, other: "RoundingError") -> None:
        """Add the errors that another object accumulated."""
        self.worst_row = max(self.worst_row, other.worst_row)
        self.differences += other.differences
        self.squares += other.squares

    def add(self, values: Tensor, rounded: Tensor) -> None:
        """Add the quantization error of a tensor [..., W], computed in float64 by blocks of rows."""
        blocks = (_row_blocks(x.detach().flatten(0, -2)) for x in (values, rounded))
        for values_RW, rounded_RW in zip(*blocks, strict=True):
            squares_R = values_RW.double().square_().sum(1)
            differences_R = (rounded_RW.double() - values_RW).square_().sum(1)
            self.squares += float(squares_R.sum())
            self.differences += float(differences_R.sum())
            rows_R = (differences_R / squares_R.masked_fill(squares_R == 0, 1)).sqrt()
            self.worst_row = max([self.worst_row, *rows_R.tolist()])
