"""Swin V2, an image transformer: patch embedding, stages of blocks, and a head on the mean token.

B images, L tokens of one, D model_dim, C classes.

Source: Liu et al. 2022 (Swin Transformer V2); with experts Hwang et al. 2023 (Tutel), section 5.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.vision.blocks import Block, PatchEmbedding, PatchMerging, Size
from fairseq_tutel.vision.options import SwinConfig, of_stages
from fairseq_tutel.vision.windows import windows_of


class Stage(nn.Module):
    """Blocks of one resolution, every second one with shifted windows, then patch merging."""

    def __init__(self, blocks: list[Block], config: SwinConfig, merging: PatchMerging | None) -> None:
        super().__init__()
        self.window = config.window
        self.blocks = nn.ModuleList(blocks)
        self.downsample = merging

    def forward(self, x_BLD: Tensor, size: Size) -> tuple[Tensor, Size]:
        """Return the tokens after the stage, and the size of the image in tokens."""
        both = [windows_of(*size, self.window, shifted, x_BLD.device) for shifted in (False, True)]
        for i, block in enumerate(self.blocks):
            if block.checkpoints and torch.is_grad_enabled():
                x_BLD = checkpoint(block, x_BLD, windows=both[i % 2], use_reentrant=False)
            else:
                x_BLD = block(x_BLD, windows=both[i % 2])
        return (x_BLD, size) if self.downsample is None else self.downsample(x_BLD, size)


class SwinV2(nn.Module):
    """Images of any size -> logits of `num_classes`."""

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
        """Return logits [B, C] of images [B, channels, height, width]."""
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
        # Blocks begin as identities, as in Swin V2's released code.
        nn.init.zeros_(module.norm1.weight)
        nn.init.zeros_(module.norm2.weight)
