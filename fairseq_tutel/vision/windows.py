"""Windows of an image: the maps between tokens and positions in windows, and attention masks.

B images, L tokens of one (height x width, row by row), D model_dim; G windows of N positions; P = G * N.
Windows of a shifted block begin half a window later. The last ones contain both edges of the image, which
do not attend to each other. If windows do not divide the image, the last ones have empty positions.

Source: Liu et al. 2021 (Swin Transformer), section 3.2.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Maps between the tokens of an image and the positions in its windows."""

    shape: tuple[int, int]  # (height, width) of a window; N is its product
    number: int  # G
    tokens_P: Tensor | None  # int64, 0 at empty positions; None: positions are tokens in order
    positions_L: Tensor  # int64, the position of each token
    empty_P1: Tensor | None  # bool; None: there are no empty positions
    mask_G1NN: Tensor | None  # fp32, 0 where a query attends to a key, else -inf; None: no mask

    def split(self, x_BLD: Tensor) -> Tensor:
        """Return x_BPD, window by window, with zeros at empty positions."""
        if self.tokens_P is None:
            return x_BLD
        return _Split.apply(x_BLD, self.tokens_P, self.positions_L, self.empty_P1)

    def merge(self, x_BPD: Tensor) -> Tensor:
        """Return x_BLD, token by token."""
        if self.tokens_P is None:
            return x_BPD
        return _Merge.apply(x_BPD, self.tokens_P, self.positions_L, self.empty_P1)


class _Split(torch.autograd.Function):
    """Gathers tokens by position. Backward gathers too, which is faster than index_select's index_add."""

    @staticmethod
    def forward(
        ctx: Any, x_BLD: Tensor, tokens_P: Tensor, positions_L: Tensor, empty_P1: Tensor | None
    ) -> Tensor:
        ctx.maps = tokens_P, positions_L, empty_P1
        x_BPD = x_BLD.index_select(1, tokens_P)
        return x_BPD if empty_P1 is None else x_BPD.masked_fill_(empty_P1, 0.0)

    @staticmethod
    def backward(ctx: Any, dx_BPD: Tensor) -> tuple[Tensor | None, ...]:
        return _Merge.apply(dx_BPD, *ctx.maps), None, None, None


class _Merge(torch.autograd.Function):
    """The inverse of `_Split`, and its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x_BPD: Tensor, tokens_P: Tensor, positions_L: Tensor, empty_P1: Tensor | None
    ) -> Tensor:
        ctx.maps = tokens_P, positions_L, empty_P1
        return x_BPD.index_select(1, positions_L)

    @staticmethod
    def backward(ctx: Any, dx_BLD: Tensor) -> tuple[Tensor | None, ...]:
        return _Split.apply(dx_BLD, *ctx.maps), None, None, None


@lru_cache(maxsize=128)
def windows_of(height: int, width: int, window: int, is_shifted: bool, device: torch.device) -> Windows:
    """Return the windows of an image of height x width tokens.

    Args:
        height: height of the image, in tokens.
        width: width of the image, in tokens.
        window: side of a window; a smaller side of the image is one window, and is not shifted.
        is_shifted: whether windows are shifted by half a window.
        device: device of the maps.
    """
    # Tensors created in inference mode cannot be used in training.
    with torch.inference_mode(False), torch.no_grad():
        return _windows(height, width, window, is_shifted, device)


def _windows(height: int, width: int, window: int, is_shifted: bool, device: torch.device) -> Windows:
    rows_PN, columns_PN = (_line(side, window, is_shifted) for side in (height, width))
    (h_groups, h), (w_groups, w) = rows_PN.shape, columns_PN.shape
    number, positions = h_groups * w_groups, h * w

    def over_image(of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return both for every position [G, N]."""
        shape = h_groups, w_groups, h, w
        return (
            of_rows[:, None, :, None].expand(shape).reshape(number, positions),
            of_columns[None, :, None, :].expand(shape).reshape(number, positions),
        )

    rows_GN, columns_GN = over_image(rows_PN, columns_PN)
    empty_GN = (rows_GN >= height) | (columns_GN >= width)
    tokens_P = (rows_GN * width + columns_GN).masked_fill(empty_GN, -1).flatten()
    positions_L = torch.empty(height * width, dtype=torch.int64)
    real_P = tokens_P >= 0
    positions_L[tokens_P[real_P]] = torch.arange(len(tokens_P))[real_P]
    # Positions of a last window that the shift has wrapped from the other edge.
    wrapped = over_image(*(_is_wrapped(line) for line in (rows_PN, columns_PN)))
    region_GN = wrapped[0] * 2 + wrapped[1]
    attends_GNN = region_GN[:, :, None] == region_GN[:, None, :]
    # Empty positions attend to something, since a softmax of nothing is NaN; their output is unused.
    attends_GNN = (attends_GNN | empty_GN[:, :, None]) & ~empty_GN[:, None, :]
    mask_GNN = torch.zeros(attends_GNN.shape).masked_fill_(~attends_GNN, -torch.inf)
    in_order = torch.equal(tokens_P, torch.arange(height * width))
    return Windows(
        shape=(h, w),
        number=number,
        tokens_P=None if in_order else tokens_P.clamp_min(0).to(device),
        positions_L=positions_L.to(device),
        empty_P1=empty_GN.view(-1, 1).to(device) if empty_GN.any() else None,
        mask_G1NN=None if attends_GNN.all() else mask_GNN.unsqueeze(1).to(device),
    )


def _line(side: int, window: int, is_shifted: bool) -> Tensor:
    """Return the coordinates [groups, window] of windows along one side; from `side` on they are empty."""
    window = min(window, side)
    groups = -(-side // window)
    shift = window // 2 if is_shifted and groups > 1 else 0
    return torch.arange(groups * window).roll(-shift).view(groups, window)


def _is_wrapped(line: Tensor) -> Tensor:
    """Return which coordinates of `_line` were wrapped from the other edge."""
    return (line < line[:, :1]).long()
