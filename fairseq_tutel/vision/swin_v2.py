"""Swin V2, an image transformer with patch embedding, stages of blocks, and a classifier of the mean token.

Shape suffixes are B (images), L (tokens of an image), D (model_dim) and C (classes).

The model is from Liu et al. 2022 (Swin Transformer V2), and its experts from Hwang et al. 2023 (Tutel),
section 5.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.vision.attention import Size, WindowAttention, Windows, windows_of
from fairseq_tutel.vision.options import SwinConfig, of_stages


class PatchEmbedding(nn.Module):
    """Converts images [B, channels, height, width] to a token per patch; zeros pad incomplete patches."""

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> tuple[Tensor, Size]:
        """Return the patch tokens x_BLD, and the number of patches along height and width."""
        height, width = images.shape[-2:]
        rest = -width % self.patch_size, -height % self.patch_size
        x = self.proj(F.pad(images, (0, rest[0], 0, rest[1])) if any(rest) else images)
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])


class PatchMerging(nn.Module):
    """Merges each 2 x 2 group of tokens into one token of twice the dimension; zeros pad odd sizes."""

    def __init__(self, dim: int, form: str) -> None:
        super().__init__()
        self.norms_first = form == "moe"
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim if self.norms_first else 2 * dim)

    def forward(self, x_BLD: Tensor, size: Size) -> tuple[Tensor, Size]:
        """Return the merged tokens, and the new height and width of the image in tokens."""
        B, _, D = x_BLD.shape
        (height, width), x = size, x_BLD.unflatten(1, size)
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        h, w = (height + 1) // 2, (width + 1) // 2
        # In a merged token of the released model, the lower neighbor is second, the right neighbor third.
        x = x.view(B, h, 2, w, 2, D).permute(0, 1, 3, 4, 2, 5).reshape(B, h * w, 4 * D)
        x = self.reduction(self.norm(x)) if self.norms_first else self.norm(self.reduction(x))
        return x, (h, w)


class Block(nn.Module):
    """A transformer block of attention and FFN with residual connections.

    The FFN has the same attributes as fairseq's FFN, so that experts can replace it.
    """

    batch_first = True  # The input of fc1 is [batch, time, D].

    def __init__(
        self, dim: int, heads: int, config: SwinConfig, drop_path: float, position_window: int
    ) -> None:
        super().__init__()
        self.norms_first, self.drop_path = config.form == "moe", drop_path
        self.attn = WindowAttention(dim, heads, config.form, position_window)
        hidden_dim = int(dim * config.mlp_ratio)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        self.activation_fn = F.gelu
        self.activation_dropout_module = nn.Dropout(config.dropout)
        self.dropout_module = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, *, windows: Windows) -> Tensor:
        """Return the tokens after attention and FFN."""
        if self.norms_first:
            x_BLD = self._added(x_BLD, self._attended(self.norm1(x_BLD), windows))
            return self._added(x_BLD, self._fed_forward(self.norm2(x_BLD)))
        x_BLD = self._added(x_BLD, self.norm1(self._attended(x_BLD, windows)))
        return self._added(x_BLD, self.norm2(self._fed_forward(x_BLD)))

    def _attended(self, x_BLD: Tensor, windows: Windows) -> Tensor:
        return self.dropout_module(windows.merge(self.attn(windows.split(x_BLD), windows)))

    def _fed_forward(self, x_BLD: Tensor) -> Tensor:
        hidden = self.activation_dropout_module(self.activation_fn(self.fc1(x_BLD)))
        return self.dropout_module(self.fc2(hidden))

    def _added(self, x_BLD: Tensor, y_BLD: Tensor) -> Tensor:
        """Return x + y, but in training, skip y at random for some images (stochastic depth).

        For all other images, y is scaled, so that the expected result is x + y. The method is from Huang et
        al. 2016 (Stochastic Depth).
        """
        if not self.training or self.drop_path == 0:
            return x_BLD + y_BLD
        kept = 1 - self.drop_path
        factors_B11 = y_BLD.new_empty(len(y_BLD), 1, 1).bernoulli_(kept).div_(kept)
        return torch.addcmul(x_BLD, y_BLD, factors_B11)


class Stage(nn.Module):
    """A stage of Swin V2: blocks, then patch merging if given. Every second block shifts its windows."""

    def __init__(self, blocks: list[Block], config: SwinConfig, merging: PatchMerging | None) -> None:
        super().__init__()
        self.window = config.window
        self.blocks = nn.ModuleList(blocks)
        self.downsample = merging

    def forward(self, x_BLD: Tensor, size: Size) -> tuple[Tensor, Size]:
        """Return the tokens after the stage, and the height and width of the image in tokens."""
        both = [windows_of(*size, self.window, shifted, x_BLD.device) for shifted in (False, True)]
        for i, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, windows=both[i % 2])
        return (x_BLD, size) if self.downsample is None else self.downsample(x_BLD, size)


class SwinV2(nn.Module):
    """The Swin V2 model, which maps images of any size to logits of `num_classes` classes."""

    def __init__(self, config: SwinConfig, channels: int, num_classes: int) -> None:
        super().__init__()
        stages = of_stages(config)
        self.patch_embed = PatchEmbedding(channels, config.embed_dim, config.patch_size)
        self.pos_drop = nn.Dropout(config.dropout)
        number = sum(depth for depth, *_ in stages)
        rates = (config.drop_path * i / max(number - 1, 1) for i in range(number))
        self.stages = nn.ModuleList()
        for i, (depth, dim, heads, position_window) in enumerate(stages):
            blocks = [Block(dim, heads, config, next(rates), position_window) for _ in range(depth)]
            merging = PatchMerging(dim, config.form) if i + 1 < len(stages) else None
            self.stages.append(Stage(blocks, config, merging))
        self.norm = nn.LayerNorm(stages[-1][1])
        self.head = nn.Linear(stages[-1][1], num_classes)
        self.apply(partial(_initialise, std=config.init_std))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, C] for images [B, channels, height, width]."""
        x_BLD, size = self.patch_embed(images)
        x_BLD = self.pos_drop(x_BLD)
        for stage in self.stages:
            x_BLD, size = stage(x_BLD, size)
        return self.head(self.norm(x_BLD).mean(1))


def _initialise(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, Block) and not module.norms_first:
        # At the start, each block is the identity function, as in Swin V2's released code.
        nn.init.zeros_(module.norm1.weight)
        nn.init.zeros_(module.norm2.weight)
