"""What rows look like on the wire: as they are, in bf16, or in fp8 with one scale per row.

R rows, D model_dim. The narrow forms lose digits; a transfer is the only place where results may
depend on how a layer is computed.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0  # of e4m3: the largest value of a row becomes this one
SCALE_BYTES = 4


def pack(rows_RD: Tensor, wire: str) -> Tensor:
    """Return what is sent for floating-point rows: [R, D] as they are or bf16, [R, D + 4] uint8 for fp8.

    A row with an infinity or NaN arrives with a NaN, never as finite numbers.
    """
    if wire == "bf16" and rows_RD.dtype.itemsize > 2:
        return rows_RD.to(torch.bfloat16)
    if wire != "fp8":
        return rows_RD
    wide_RD = rows_RD.float()
    # The smallest normal number: a row of zeros divides by it, and 1 / scale stays finite.
    smallest = torch.finfo(torch.float32).tiny * FP8_LARGEST
    scale_R1 = wide_RD.abs().amax(1, keepdim=True).clamp_min(smallest) / FP8_LARGEST
    narrow_RD = (wide_RD / scale_R1).to(FP8).view(torch.uint8)
    return torch.cat([narrow_RD, _fresh(scale_R1).view(torch.uint8)], 1)


def unpack(wire_RX: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """Return rows of `dtype` from what `pack` made of rows of that dtype."""
    if wire != "fp8":
        return wire_RX.to(dtype)
    narrow_RD = wire_RX[:, :-SCALE_BYTES].view(FP8)
    scale_R1 = _fresh(wire_RX[:, -SCALE_BYTES:]).view(torch.float32)
    return (narrow_RD.float() * scale_R1).to(dtype)


def _fresh(tensor: Tensor) -> Tensor:
    # To be viewed as another dtype, also where it has one row: strides and offset anew.
    return tensor.clone(memory_format=torch.contiguous_format)
