"""Windows of an image: the order of tokens in windows, and attention masks.

B images, L tokens of one (height x width, row by row), D model_dim; G windows of N positions; P = G * N.
Windows of a shifted block begin half a window later. The last ones contain both edges of the image, which
do not attend to each other. If windows do not divide the image, the last ones have empty positions.

Source: Liu et al. 2021 (Swin Transformer), section 3.2.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]  # (height, width), in tokens


@dataclass(frozen=True)
class Windows:
    """Moves the tokens of an image to the positions in its windows, and back."""

    size: Size  # of the image
    shape: Size  # of a window; N is its product
    groups: Size  # number of windows by height and width; G is its product
    shift: Size
    mask_G1NN: Tensor | None = None  # fp32, 0 where a query attends to a key, else -inf; None: no mask

    @property
    def number(self) -> int:
        """G."""
        return self.groups[0] * self.groups[1]

    def split(self, x_BLD: Tensor) -> Tensor:
        """Return x_BPD, window by window, with zeros at empty positions."""
        x, (rows, columns), (h, w) = x_BLD.unflatten(1, self.size), self.groups, self.shape
        below, right = rows * h - self.size[0], columns * w - self.size[1]
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        return x.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3).flatten(1, 4)

    def merge(self, x_BPD: Tensor) -> Tensor:
        """Return x_BLD, token by token."""
        x = x_BPD.unflatten(1, (*self.groups, *self.shape)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x = x.roll(self.shift, (1, 2))
        return x[:, : self.size[0], : self.size[1]].flatten(1, 2)


@lru_cache(maxsize=128)
def windows_of(height: int, width: int, window: int, is_shifted: bool, device: torch.device) -> Windows:
    """Return the windows of an image of height x width tokens, shifted by half a window or not.

    A side of the image that is smaller than `window` is one window, and is not shifted.
    """
    h, w = min(window, height), min(window, width)
    rows, columns = -(-height // h), -(-width // w)
    shift = h // 2 if is_shifted and rows > 1 else 0, w // 2 if is_shifted and columns > 1 else 0
    windows = Windows((height, width), (h, w), (rows, columns), shift)
    # Tensors created in inference mode cannot be used in training.
    with torch.inference_mode(False), torch.no_grad():
        padded = replace(windows, size=(rows * h, columns * w))
        at_L2 = torch.cartesian_prod(*map(torch.arange, padded.size))
        at_GN2 = padded.split(at_L2.unsqueeze(0)).view(windows.number, h * w, 2)
        is_empty_GN = (at_GN2 >= torch.tensor(windows.size)).any(dim=2)
        # Positions of a last window that the shift has wrapped from the other edge.
        is_wrapped_GN2 = at_GN2 < at_GN2[:, :1]
        attends_GNN = (is_wrapped_GN2.unsqueeze(2) == is_wrapped_GN2.unsqueeze(1)).all(dim=3)
        # Empty positions attend to something, since a softmax of nothing is NaN; their output is unused.
        attends_GNN = (attends_GNN | is_empty_GN.unsqueeze(2)) & ~is_empty_GN.unsqueeze(1)
        if attends_GNN.all():
            return windows
        mask_GNN = torch.zeros(attends_GNN.shape).masked_fill_(~attends_GNN, -torch.inf)
        return replace(windows, mask_G1NN=mask_GNN.unsqueeze(1).to(device))
