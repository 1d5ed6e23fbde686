"""Attention's bias by position: a small network of how far apart query and key are, on a scale of logs.

M heads, N places of a window of h x w.

Source: Liu et al. 2022 (Swin Transformer V2), section 3.3.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN_DIM = 512
# Of the released code: an offset of the whole window is 8 before the logarithm, and 1 behind it.
SPAN = 8


class PositionBias(nn.Sequential):
    """The network, by the released names: (offset down, offset right) -> 512 -> M.

    Args:
        heads: M.
        trained_window: side that its offsets are measured by; 0: that of the window it is asked for.
    """

    def __init__(self, heads: int, trained_window: int = 0) -> None:
        super().__init__(
            nn.Linear(2, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, heads, bias=False)
        )
        self.trained_window = trained_window

    def forward(self, window: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Return the bias [M, N, N] of every query (first) and key in a window of h x w."""
        weight: Any = self[0].weight
        offsets, index_NN = _offsets(*window, self.trained_window, weight.device)
        table = super().forward(offsets.to(weight.dtype))
        return table.t()[:, index_NN]


@lru_cache(maxsize=128)
def _offsets(h: int, w: int, trained: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all offsets [(2h-1)(2w-1), 2] within a window, and which of them each pair [N, N] has."""
    # What is made in inference mode could not be used by a training later.
    with torch.inference_mode(False), torch.no_grad():
        lines = [
            torch.arange(1 - side, side) * (SPAN / max((trained or side) - 1, 1)) for side in (h, w)
        ]
        table = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).view(-1, 2)
        table = table.sign() * torch.log2(table.abs() + 1) / math.log2(SPAN)
        rows, columns = torch.arange(h * w) // w, torch.arange(h * w) % w
        down_NN = rows[:, None] - rows + h - 1
        right_NN = columns[:, None] - columns + w - 1
        return table.to(device), (down_NN * (2 * w - 1) + right_NN).to(device)
