"""Self-attention within windows of an image, as in Swin V2 or as in the released SwinV2-MoE.

Shape suffixes are B (images), L (tokens of an image, row by row), D (model_dim) and M (heads of dimension
d). An image has G windows of N positions each, and P = G * N. In a shifted block, windows begin half a
window later. The last windows then contain tokens of opposite edges of the image, between which there is no
attention. If the image size is no multiple of the window size, the last windows have empty positions.

The windows are from Liu et al. 2021 (Swin Transformer), section 3.2. The attention is from Liu et al. 2022
(Swin Transformer V2), sections 3.2 and 3.3, and from the released code.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = tuple[int, int]  # A Size is (height, width), in tokens.
# The initial and the largest scale of the cosine similarity.
FIRST_SCALE, MAX_SCALE = 10.0, 100.0
MAX_BIAS = 16.0
HIDDEN_DIM = 512
# As in the released code, offsets are scaled to at most SPAN; log2(1 + offset) is divided by log2(SPAN).
SPAN = 8


@dataclass(frozen=True)
class Windows:
    """The partition of an image's tokens into attention windows."""

    size: Size  # The height and width of an image in tokens.
    shape: Size  # The height and width of a window, whose product is N.
    groups: Size  # The numbers of windows along height and width, whose product is G.
    shift: Size
    mask_G1NN: Tensor | None = None  # 0 where a query attends to a key, -inf elsewhere.

    @property
    def number(self) -> int:
        """The number of attention windows, G."""
        return self.groups[0] * self.groups[1]

    def split(self, x_BLD: Tensor) -> Tensor:
        """Sort an image's tokens by window, and return them as x_BPD, with zeros at empty positions."""
        x, (rows, columns), (h, w) = x_BLD.unflatten(1, self.size), self.groups, self.shape
        below, right = rows * h - self.size[0], columns * w - self.size[1]
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        return x.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3).flatten(1, 4)

    def merge(self, x_BPD: Tensor) -> Tensor:
        """Undo `split`: return tokens in the order of the image, x_BLD, without empty positions."""
        x = x_BPD.unflatten(1, (*self.groups, *self.shape)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x = x.roll(self.shift, (1, 2))
        return x[:, : self.size[0], : self.size[1]].flatten(1, 2)


@lru_cache(maxsize=128)
def windows_of(height: int, width: int, window: int, is_shifted: bool, device: torch.device) -> Windows:
    """Return the attention windows of an image, shifted by half a window if `is_shifted`.

    Height, width and window are given in tokens. A dimension of at most `window` tokens has one unshifted
    window.
    """
    h, w = min(window, height), min(window, width)
    rows, columns = -(-height // h), -(-width // w)
    shift = h // 2 if is_shifted and rows > 1 else 0, w // 2 if is_shifted and columns > 1 else 0
    windows = Windows((height, width), (h, w), (rows, columns), shift)
    # Cached tensors that were created in inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        padded = replace(windows, size=(rows * h, columns * w))
        at_L2 = torch.cartesian_prod(*map(torch.arange, padded.size))
        at_GN2 = padded.split(at_L2.unsqueeze(0)).view(windows.number, h * w, 2)
        is_empty_GN = (at_GN2 >= torch.tensor(windows.size)).any(dim=2)
        # At these positions, the last windows have tokens from the opposite edge of the image.
        is_wrapped_GN2 = at_GN2 < at_GN2[:, :1]
        attends_GNN = (is_wrapped_GN2.unsqueeze(2) == is_wrapped_GN2.unsqueeze(1)).all(dim=3)
        # Queries at empty positions attend to all tokens, because a softmax of only -inf is NaN.
        attends_GNN = (attends_GNN | is_empty_GN.unsqueeze(2)) & ~is_empty_GN.unsqueeze(1)
        if attends_GNN.all():
            return windows
        mask_GNN = torch.zeros(attends_GNN.shape).masked_fill_(~attends_GNN, -torch.inf)
        return replace(windows, mask_G1NN=mask_GNN.unsqueeze(1).to(device))


class PositionBias(nn.Sequential):
    """An MLP that computes each head's attention bias from the log-scaled offset between query and key.

    The MLP has 2 inputs (down, right), 512 hidden units and M outputs. `trained_window` is the window size
    that scales the offsets; 0 means the current window size.
    """

    def __init__(self, heads: int, trained_window: int = 0) -> None:
        super().__init__(nn.Linear(2, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, heads, bias=False))
        self.trained_window = trained_window

    def forward(self, window: Size) -> Tensor:  # type: ignore[override]
        """Return the attention bias [M, N, N] for each head, query and key in a window of h x w tokens."""
        weight: Any = self[0].weight
        offsets, index_NN = _offsets(*window, self.trained_window, weight.device)
        return super().forward(offsets.to(weight.dtype)).t()[:, index_NN]


@lru_cache(maxsize=128)
def _offsets(h: int, w: int, trained: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log-scaled offsets [(2h-1)(2w-1), 2], and each query-key pair's offset index [N, N]."""
    # Cached tensors that were created in inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        lines = [torch.arange(1 - side, side) * (SPAN / max((trained or side) - 1, 1)) for side in (h, w)]
        table = torch.cartesian_prod(*lines)
        table = table.sign() * torch.log2(table.abs() + 1) / math.log2(SPAN)
        at_N2 = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        down_NN, right_NN = (at_N2.unsqueeze(1) - at_N2 + torch.tensor([h - 1, w - 1])).unbind(2)
        return table.to(device), (down_NN * (2 * w - 1) + right_NN).to(device)


class WindowAttention(nn.Module):
    """Self-attention within windows, with a relative position bias.

    In the form `v2`, scores are cosine similarities times a learned scale per head, position biases are
    between 0 and 16, and the key projection has no bias. In the form `moe`, scores are scaled dot products,
    and position biases have no bounds.
    """

    def __init__(self, dim: int, heads: int, form: str, position_window: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.by_cosine = form == "v2"
        self.qkv = nn.Linear(dim, 3 * dim, bias=not self.by_cosine)
        self.proj = nn.Linear(dim, dim)
        self.cpb_mlp = PositionBias(heads, position_window)
        if self.by_cosine:
            self.q_bias = nn.Parameter(torch.zeros(dim))
            self.v_bias = nn.Parameter(torch.zeros(dim))
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(FIRST_SCALE)))

    def forward(self, x_BPD: Tensor, windows: Windows) -> Tensor:
        """Apply attention to tokens that are sorted by window, and return the outputs [B, P, D]."""
        B, P, D = x_BPD.shape
        G, M, N = windows.number, self.heads, P // windows.number
        # With a mask, windows are part of the head dimension, else of the batch dimension.
        copies = 1 if windows.mask_G1NN is None else G
        batch = B * G // copies, copies * M
        scale: float | Tensor = (D // M) ** -0.5
        bias_MNN = self.cpb_mlp(windows.shape)
        qkv_bias: Tensor | None = self.qkv.bias
        if self.by_cosine:
            scale = self.logit_scale.clamp_max(math.log(MAX_SCALE)).exp().repeat(copies, 1, 1)
            bias_MNN = MAX_BIAS * bias_MNN.sigmoid()
            qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        if windows.mask_G1NN is not None:
            bias_MNN = (bias_MNN + windows.mask_G1NN).flatten(0, 1)
        qkv_BPX = F.linear(x_BPD, self.qkv.weight, qkv_bias)
        q, k, v = (
            tensor.reshape(*batch, N, D // M)
            for tensor in qkv_BPX.view(B, G, N, 3, M, D // M).permute(3, 0, 1, 4, 2, 5)
        )
        if self.by_cosine:
            # Multiplying rows by inverse norms is several times faster than the division in F.normalize.
            scale, k = scale * _inverse_norm(q), (k * _inverse_norm(k)).to(v.dtype)
        y = _attention(q, k, v, scale, bias_MNN.unsqueeze(0).to(v.dtype))
        return self.proj(y.view(B, G, M, N, D // M).transpose(2, 3).reshape(B, P, D))


def _inverse_norm(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)  # In fp16, 1e-12 would be 0.
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).clamp_min(1e-12).reciprocal()


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q k^T * scale + bias) v."""
    if torch.is_grad_enabled() and q.device.type == "cpu":
        # If the bias needs a gradient, torch's attention on CPUs is unfused. It takes 1.1 to 1.2 times as
        # long as the next two lines, because it makes more passes over the scores.
        weights = ((q * scale).to(k.dtype) @ k.mT).add_(bias).softmax(-1)
        return weights @ v
    if isinstance(scale, Tensor):
        q, scale = (q * scale).to(k.dtype), 1.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
