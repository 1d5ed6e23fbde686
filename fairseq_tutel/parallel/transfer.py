"""Convert rows [R, D] to and from the transfer dtype, and measure the time of their exchange.

The transfer dtypes bf16 and fp8 round values.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0  # The largest e4m3 number, to which each row's maximum is scaled.
SCALE_BYTES = 4


def pack(rows_RD: Tensor, transfer_dtype: str) -> Tensor:
    """Convert rows [R, D] to the transfer dtype, as [R, D] or, for fp8, as [R, D + 4] uint8.

    The last 4 bytes of an fp8 row are its scale. fp8 turns an infinity into a NaN.
    """
    if transfer_dtype == "bf16" and rows_RD.dtype.itemsize > 2:
        return rows_RD.to(torch.bfloat16)
    if transfer_dtype != "fp8":
        return rows_RD
    wide_RD = rows_RD.float()
    # A row of zeros gets the smallest normal number as scale, because the inverse of this number is finite.
    smallest = torch.finfo(torch.float32).tiny * FP8_LARGEST
    scale_R1 = wide_RD.abs().amax(1, keepdim=True).clamp_min(smallest) / FP8_LARGEST
    narrow_RD = (wide_RD / scale_R1).to(FP8).view(torch.uint8)
    return torch.cat([narrow_RD, _fresh(scale_R1).view(torch.uint8)], 1)


def unpack(sent_RX: Tensor, transfer_dtype: str, dtype: torch.dtype) -> Tensor:
    """Convert rows from the transfer dtype back to the dtype `dtype`."""
    if transfer_dtype != "fp8":
        return sent_RX.to(dtype)
    narrow_RD = sent_RX[:, :-SCALE_BYTES].view(FP8)
    scale_R1 = _fresh(sent_RX[:, -SCALE_BYTES:]).view(torch.float32)
    return (narrow_RD.float() * scale_R1).to(dtype)


def _fresh(tensor: Tensor) -> Tensor:
    # `contiguous` would not copy a single row, but `view(dtype)` can fail for its strides or offset.
    return tensor.clone(memory_format=torch.contiguous_format)


class ExchangeTimer:
    """Measures the time of row exchanges in ms, by the host clock and, on a GPU, by CUDA events."""

    def __init__(self) -> None:
        self.cpu_ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def measure(self, rows: Tensor, collective: Callable[[], Tensor]) -> Tensor:
        """Run `collective()`, add its duration to the total, and return its result."""
        events = None
        if rows.is_cuda:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        start = time.perf_counter()
        received = collective()
        self.cpu_ms += 1000 * (time.perf_counter() - start)
        if events is not None:
            events[1].record()
            self._events.append(events)
        return received

    def read_and_reset(self) -> dict[str, float]:
        """Wait for the GPU, return the total times in ms since the last call, and reset these times."""
        times = {"all_to_all_cpu_time_ms": self.cpu_ms}
        if self._events:
            self._events[-1][1].synchronize()
            times["all_to_all_cuda_time_ms"] = sum(a.elapsed_time(b) for a, b in self._events)
        self.cpu_ms, self._events = 0.0, []
        return times
