"""Experts' tensors in fewer bits: bf16, or int8 and int4 with a scale for every row.

A row is what lies along the last dimension. Of a tensor [..., W] of R rows are stored

    bf16    the numbers themselves
    int8    R scales in float32, then R rows of W bytes: number = scale * byte, which is from -127 to 127
    int4    R scales in float32, then R rows of ceil(W / 2) bytes: number = scale * (nibble - 8); the low
            nibbles are the row's first half, the high ones its second, 8 where that is shorter

and a scale is the row's largest magnitude over 127 or 7, so that rounding is symmetric and 0 stays 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PACKINGS = ("bf16", "int8", "int4")
LARGEST = {"int8": 127, "int4": 7}
SCALE_BYTES = 4
BLOCK = 2**18  # numbers


@dataclass(frozen=True)
class Packed:
    """How a tensor is stored in fewer bits.

    Attributes:
        packing: one of PACKINGS.
        shape: of the tensor.
        dtype: of the tensor.
    """

    packing: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of what is stored."""
        return torch.bfloat16 if self.packing == "bf16" else torch.uint8

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of what is stored: bytes, unless it is numbers still."""
        if self.packing == "bf16":
            return self.shape
        return (self._num_rows * (SCALE_BYTES + self._row_bytes),)

    @property
    def _num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def _row_bytes(self) -> int:
        width = self.shape[-1]
        return -(-width // 2) if self.packing == "int4" else width

    def pack(self, values: Tensor) -> Tensor:
        """Return what is stored of a tensor.

        Raises:
            ValueError: a number is infinite or none.
        """
        if self.packing == "bf16":
            return values.to(torch.bfloat16)
        largest = LARGEST[self.packing]
        values_RW = values.detach().float().reshape(-1, self.shape[-1])
        scales_R1 = values_RW.abs().amax(1, keepdim=True) / largest
        if not scales_R1.isfinite().all():
            raise ValueError("it holds numbers that are not finite")
        whole_RW = (values_RW / scales_R1.masked_fill(scales_R1 == 0, 1)).round_()
        whole_RW.clamp_(-largest, largest)
        return torch.cat([scales_R1.view(-1).view(torch.uint8), self._bytes(whole_RW).flatten()])

    def _bytes(self, whole_RW: Tensor) -> Tensor:
        if self.packing == "int8":
            return whole_RW.to(torch.int8).view(torch.uint8)
        half = self._row_bytes
        nibbles_RW = torch.full((len(whole_RW), 2 * half), 8, dtype=torch.uint8)
        nibbles_RW[:, : self.shape[-1]] = (whole_RW + 8).to(torch.uint8)
        return nibbles_RW[:, :half] | nibbles_RW[:, half:] << 4

    def unpack(self, stored: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensor: products in float32, rounded to its dtype.

        Args:
            stored: what `pack` gave.
            out: of the tensor's shape and dtype, to be written; None for new memory.
        """
        out = stored.new_empty(self.shape, dtype=self.dtype) if out is None else out
        if self.packing == "bf16":
            return out.copy_(stored)
        num_rows, width, row_bytes = self._num_rows, self.shape[-1], self._row_bytes
        scales_R1 = stored[: SCALE_BYTES * num_rows].clone().view(torch.float32).unsqueeze(1)
        bytes_RB = stored[SCALE_BYTES * num_rows :].view(num_rows, row_bytes)
        is_wide = self.dtype == torch.float32
        wide_RW = (out if is_wide else out.float()).view(num_rows, width)
        if self.packing == "int8":
            wide_RW.copy_(bytes_RB.view(torch.int8))
        else:
            wide_RW[:, :row_bytes] = bytes_RB & 15
            wide_RW[:, row_bytes:] = bytes_RB[:, : width - row_bytes] >> 4
            wide_RW -= 8
        wide_RW *= scales_R1
        return out if is_wide else out.copy_(wide_RW.view(self.shape))


def packed_form(packing: str, shape: tuple[int, ...], dtype: torch.dtype) -> Packed | None:
    """Return how an expert's tensor is stored; None as it is: biases and whole numbers stay."""
    if not packing or len(shape) < 2 or not dtype.is_floating_point:
        return None
    return Packed(packing, shape, dtype)


@dataclass
class RoundingError:
    """How far from what they were numbers are that were packed.

    Attributes:
        worst_row: the largest relative error of a row: |difference| / |row|.
    """

    worst_row: float = 0.0
    _differences: float = 0.0
    _squares: float = 0.0

    @property
    def relative(self) -> float:
        """The root of the mean squared difference over that of the numbers."""
        return math.sqrt(self._differences / self._squares) if self._squares else 0.0

    def add(self, values: Tensor, rounded: Tensor) -> None:
        """Take a tensor [..., W] into account; numbers in float64 are there for some rows at a time."""
        rows = max(1, BLOCK // max(1, values.shape[-1]))
        blocks = zip(
            *(x.detach().flatten(0, -2).split(rows) for x in (values, rounded)), strict=True
        )
        sums = [_sums(own.double(), other.double()) for own, other in blocks]
        squares_R, differences_R = map(torch.cat, zip(*sums, strict=True))
        self._squares += float(squares_R.sum())
        self._differences += float(differences_R.sum())
        rows_R = (differences_R / squares_R.masked_fill(squares_R == 0, 1)).sqrt()
        self.worst_row = max([self.worst_row, *rows_R.max(0, keepdim=True).values.tolist()])


def _sums(values_RW: Tensor, rounded_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squares of rows, and those of what rounding changed, summed over each [R]."""
    return values_RW.square().sum(1), (rounded_RW - values_RW).square_().sum(1)
