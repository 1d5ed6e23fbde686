"""Position bias of attention: a small network of the log-spaced offsets between query and key.

M heads, N positions of a window of h x w.

Source: Liu et al. 2022 (Swin Transformer V2), section 3.3.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN_DIM = 512
# From the released code: the largest offset is 8 before the logarithm, and 1 after it.
SPAN = 8


class PositionBias(nn.Sequential):
    """The network, with the released names: (offset down, offset right) -> 512 -> M.

    Args:
        heads: M.
        trained_window: side of the window that scales its offsets; 0: that of the current window.
    """

    def __init__(self, heads: int, trained_window: int = 0) -> None:
        super().__init__(nn.Linear(2, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, heads, bias=False))
        self.trained_window = trained_window

    def forward(self, window: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Return the bias [M, N, N] of each query (first) and key in a window of h x w."""
        weight: Any = self[0].weight
        offsets, index_NN = _offsets(*window, self.trained_window, weight.device)
        table = super().forward(offsets.to(weight.dtype))
        return table.t()[:, index_NN]


@lru_cache(maxsize=128)
def _offsets(h: int, w: int, trained: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets [(2h-1)(2w-1), 2] in a window, and the index [N, N] of each pair's offset."""
    # Tensors created in inference mode cannot be used in training.
    with torch.inference_mode(False), torch.no_grad():
        lines = [torch.arange(1 - side, side) * (SPAN / max((trained or side) - 1, 1)) for side in (h, w)]
        table = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).view(-1, 2)
        table = table.sign() * torch.log2(table.abs() + 1) / math.log2(SPAN)
        rows, columns = torch.arange(h * w) // w, torch.arange(h * w) % w
        down_NN = rows[:, None] - rows + h - 1
        right_NN = columns[:, None] - columns + w - 1
        return table.to(device), (down_NN * (2 * w - 1) + right_NN).to(device)
