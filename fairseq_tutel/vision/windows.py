"""Windows of an image: which tokens see each other, and the way there and back.

B images, L tokens of one (height x width, row by row), D model_dim; G windows, N places in each; P = G * N.
Windows of a shifted block begin half a window later, and the last ones hold both edges of the image, which
do not see each other. Where windows do not divide the image, the last ones have empty places.

Source: Liu et al. 2021 (Swin Transformer), section 3.2.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """How the tokens of an image lie in windows.

    Attributes:
        shape: (height, width) of a window; N is its product.
        number: G.
        tokens_P: int64, the token at each place, 0 at an empty one; None: places are tokens in their order.
        places_L: int64, the place of each token.
        empty_P1: bool, the empty places; None where there are none.
        mask_G1NN: fp32, 0 where a query (before) sees a key, else -inf; None: all see all.
    """

    shape: tuple[int, int]
    number: int
    tokens_P: Tensor | None
    places_L: Tensor
    empty_P1: Tensor | None
    mask_G1NN: Tensor | None

    def parted(self, x_BLD: Tensor) -> Tensor:
        """Return x_BPD, window by window, 0 at empty places."""
        if self.tokens_P is None:
            return x_BLD
        return _Part.apply(x_BLD, self.tokens_P, self.places_L, self.empty_P1)

    def joined(self, x_BPD: Tensor) -> Tensor:
        """Return x_BLD, token by token."""
        if self.tokens_P is None:
            return x_BPD
        return _Join.apply(x_BPD, self.tokens_P, self.places_L, self.empty_P1)


class _Part(torch.autograd.Function):
    """Gathers by places; its backward gathers by tokens, where index_select's own would add one by one."""

    @staticmethod
    def forward(
        ctx: Any, x_BLD: Tensor, tokens_P: Tensor, places_L: Tensor, empty_P1: Tensor | None
    ) -> Tensor:
        ctx.maps = tokens_P, places_L, empty_P1
        x_BPD = x_BLD.index_select(1, tokens_P)
        return x_BPD if empty_P1 is None else x_BPD.masked_fill_(empty_P1, 0.0)

    @staticmethod
    def backward(ctx: Any, dx_BPD: Tensor) -> tuple[Tensor | None, ...]:
        return _Join.apply(dx_BPD, *ctx.maps), None, None, None


class _Join(torch.autograd.Function):
    """The inverse of `_Part`, and its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x_BPD: Tensor, tokens_P: Tensor, places_L: Tensor, empty_P1: Tensor | None
    ) -> Tensor:
        ctx.maps = tokens_P, places_L, empty_P1
        return x_BPD.index_select(1, places_L)

    @staticmethod
    def backward(ctx: Any, dx_BLD: Tensor) -> tuple[Tensor | None, ...]:
        return _Part.apply(dx_BLD, *ctx.maps), None, None, None


@lru_cache(maxsize=128)
def windows_of(
    height: int, width: int, window: int, is_shifted: bool, device: torch.device
) -> Windows:
    """Return the windows of an image of height x width tokens.

    Args:
        height: of the image, in tokens.
        width: likewise.
        window: its side; a smaller side of the image is one window, and is not shifted.
        is_shifted: by half a window.
        device: of the maps.
    """
    # What is made in inference mode could not be used by a training later.
    with torch.inference_mode(False), torch.no_grad():
        return _windows(height, width, window, is_shifted, device)


def _windows(
    height: int, width: int, window: int, is_shifted: bool, device: torch.device
) -> Windows:
    rows_PN, columns_PN = (_line(side, window, is_shifted) for side in (height, width))
    (h_groups, h), (w_groups, w) = rows_PN.shape, columns_PN.shape
    number, places = h_groups * w_groups, h * w

    def over_image(of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return both for every place [G, N]."""
        shape = h_groups, w_groups, h, w
        return (
            of_rows[:, None, :, None].expand(shape).reshape(number, places),
            of_columns[None, :, None, :].expand(shape).reshape(number, places),
        )

    rows_GN, columns_GN = over_image(rows_PN, columns_PN)
    empty_GN = (rows_GN >= height) | (columns_GN >= width)
    tokens_P = (rows_GN * width + columns_GN).masked_fill(empty_GN, -1).flatten()
    places_L = torch.empty(height * width, dtype=torch.int64)
    real_P = tokens_P >= 0
    places_L[tokens_P[real_P]] = torch.arange(len(tokens_P))[real_P]
    # In a last window, what the shift has brought there from the other edge.
    wrapped = over_image(*(_is_wrapped(line) for line in (rows_PN, columns_PN)))
    region_GN = wrapped[0] * 2 + wrapped[1]
    sees_GNN = region_GN[:, :, None] == region_GN[:, None, :]
    # Nobody reads what an empty place sees, but it must see something: softmax of nothing is NaN.
    sees_GNN = (sees_GNN | empty_GN[:, :, None]) & ~empty_GN[:, None, :]
    mask_GNN = torch.zeros(sees_GNN.shape).masked_fill_(~sees_GNN, -torch.inf)
    in_order = torch.equal(tokens_P, torch.arange(height * width))
    return Windows(
        shape=(h, w),
        number=number,
        tokens_P=None if in_order else tokens_P.clamp_min(0).to(device),
        places_L=places_L.to(device),
        empty_P1=empty_GN.view(-1, 1).to(device) if empty_GN.any() else None,
        mask_G1NN=None if sees_GNN.all() else mask_GNN.unsqueeze(1).to(device),
    )


def _line(side: int, window: int, is_shifted: bool) -> Tensor:
    """Return the positions [groups, window] in the windows of one side; from `side` on they are empty."""
    window = min(window, side)
    groups = -(-side // window)
    shift = window // 2 if is_shifted and groups > 1 else 0
    return torch.arange(groups * window).roll(-shift).view(groups, window)


def _is_wrapped(line: Tensor) -> Tensor:
    """Return, for `_line`'s positions, which have come from the other edge."""
    return (line < line[:, :1]).long()
