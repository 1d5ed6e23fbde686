"""The options of the task `image_classification`, of Swin V2, and of experts in Swin V2."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fairseq_tutel.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Rule,
    option,
    whole,
)

image_option = partial(option, of="task", theme="Images")
vision = partial(option, theme="Vision", of="model")
SHARE: Rule = (lambda v: 0 <= v <= 1, "give a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Options of the task `image_classification`."""

    prefix: ClassVar[str] = "image_"

    size: int = image_option(
        0,
        "height and width to which images are resized and center-cropped; 0: the size of the first "
        "training image",
        unit="pixels",
        rule=AT_LEAST_0,
    )
    channels: int = image_option(
        0,
        "number of channels of an image: 1 (gray) or 3 (RGB); 0: as in the first training image",
        rule=(lambda v: v in (0, 1, 3), "give 0, 1 or 3"),
    )
    crop_padding: int = image_option(
        0,
        "width of the black border that is added to an image before the random crop in training",
        unit="pixels",
        rule=AT_LEAST_0,
    )
    flip: float = image_option(0.0, "probability of a horizontal flip in training", rule=SHARE)
    mixup: float = image_option(
        0.0,
        "mixup in training: blend each image with the next image of the batch, with a weight drawn from "
        "Beta(a, a), where a is the value of this option; 0: off",
        rule=NOT_NEGATIVE,
    )


def numbers(text: str) -> list[int]:
    """Parse integers separated by commas, such as "2,2,18,2"; return [] for any other text."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else []


def _each(least: int, what: str) -> Rule:
    return lambda v: bool(numbers(v)) and min(numbers(v)) >= least, f"give {what}"


@dataclass(frozen=True)
class SwinConfig:
    """Options of Swin V2, with and without experts."""

    prefix: ClassVar[str] = "swin_"  # prefix of the fields' names in fairseq's configuration
    form: str = vision(
        "v2",
        "v2 has cosine attention, position bias of at most 16, and norms after attention and FFN (Swin "
        "V2); moe has scaled dot-product attention and norms before attention and FFN (the released "
        "SwinV2-MoE)",
        choices=("v2", "moe"),
    )
    patch_size: int = vision(
        4, "height and width of a patch; each patch is one token", unit="pixels", rule=AT_LEAST_1
    )
    embed_dim: int = vision(
        96, "model dimension of the first stage; every later stage doubles the dimension", rule=AT_LEAST_1
    )
    depths: str = vision(
        "2,2,18,2", "number of blocks per stage", rule=_each(1, 'one number per stage, such as "2,2,18,2"')
    )
    heads: str = vision(
        "3,6,12,24",
        "number of attention heads in each stage",
        rule=_each(1, 'one number per stage, such as "3,6,12,24"'),
    )
    window: int = vision(
        12,
        "height and width of an attention window; an image that is smaller is one window",
        unit="tokens",
        rule=AT_LEAST_1,
    )
    position_windows: str = vision(
        "0",
        "window size with which the position bias was trained: one number, or one number per stage; 0: "
        "the value of --swin-window",
        rule=_each(0, 'one number of tokens, or one per stage, such as "12,12,12,6"'),
    )
    mlp_ratio: float = vision(
        4.0, "ratio of the FFN's hidden dimension to the model dimension", rule=POSITIVE
    )
    dropout: float = vision(0.0, "dropout probability in the FFN and after attention", rule=PROBABILITY)
    drop_path: float = vision(
        0.2,
        "stochastic depth: probability in training that an image skips the attention or the FFN of the "
        "last block; for earlier blocks, the probability is lower, down to 0 in the first block",
        rule=PROBABILITY,
    )
    init_std: float = vision(0.02, "standard deviation of initial weights of linear layers", rule=POSITIVE)


@dataclass(frozen=True)
class SwinExpertsConfig:
    """Options of experts in Swin V2 models."""

    prefix: ClassVar[str] = "swin_"
    expert_stages: int = vision(
        2,
        "number of last stages that have experts; --moe-freq counts the blocks of each stage separately",
        rule=whole(1),
    )
    expert_dropout: float = vision(
        0.1, "dropout probability of the experts' hidden layer", rule=PROBABILITY
    )


def of_stages(config: SwinConfig) -> list[tuple[int, int, int, int]]:
    """Return each stage's number of blocks, model dimension, head count and position-bias window."""
    depths, heads = numbers(config.depths), numbers(config.heads)
    windows = numbers(config.position_windows)
    windows = windows * len(depths) if len(windows) == 1 else windows
    if not len(depths) == len(heads) == len(windows):
        raise ValueError(
            f"--swin-heads is {config.heads}, --swin-position-windows {config.position_windows} and "
            f"--swin-depths {config.depths}; give one number for each stage."
        )
    dims = [config.embed_dim * 2**i for i in range(len(depths))]
    if any(dim % count for dim, count in zip(dims, heads, strict=True)):
        raise ValueError(f"--swin-heads is {config.heads}; give divisors of {', '.join(map(str, dims))}.")
    return list(zip(depths, dims, heads, windows, strict=True))
