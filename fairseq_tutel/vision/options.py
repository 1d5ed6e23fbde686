"""The table of options of Swin V2: what its layers are, and which of them have experts."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fairseq_tutel.options.option import (
    AT_LEAST_1,
    POSITIVE,
    PROBABILITY,
    Rule,
    option,
    whole,
)

vision = partial(option, theme="Vision", of="model")


def numbers(text: str) -> list[int]:
    """Read "2,2,18,2"; nothing where it is no list of whole numbers."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else []


def _each(least: int, what: str) -> Rule:
    return lambda v: bool(numbers(v)) and min(numbers(v)) >= least, f"give {what}"


@dataclass(frozen=True)
class SwinConfig:
    """What a Swin V2 is, with experts or without."""

    prefix: ClassVar[str] = "swin_"  # of the keys
    form: str = vision(
        "v2",
        "v2: attention by cosine, position bias of at most 16, a norm behind each step (Swin V2); moe: "
        "attention by scaled dot product, a norm before each step (the released SwinV2-MoE)",
        choices=("v2", "moe"),
    )
    patch_size: int = vision(
        4, "side of the square of pixels that is a token at first", unit="pixels", rule=AT_LEAST_1
    )
    embed_dim: int = vision(
        96, "model dimension of the first stage; every stage doubles it", rule=AT_LEAST_1
    )
    depths: str = vision(
        "2,2,18,2",
        "blocks of each stage",
        rule=_each(1, 'one number per stage, such as "2,2,18,2"'),
    )
    heads: str = vision(
        "3,6,12,24",
        "attention heads of each stage's blocks",
        rule=_each(1, 'one number per stage, such as "3,6,12,24"'),
    )
    window: int = vision(
        12,
        "side of the square of tokens within which attention looks; a smaller image is one window",
        unit="tokens",
        rule=AT_LEAST_1,
    )
    position_windows: str = vision(
        "0",
        "window that the position bias was trained with, where it is another now: one number, or one "
        "per stage; 0: the same",
        rule=_each(0, 'one number of tokens, or one per stage, such as "12,12,12,6"'),
    )
    mlp_ratio: float = vision(
        4.0, "hidden dimension of the feed-forward step, in model dimensions", rule=POSITIVE
    )
    dropout: float = vision(
        0.0,
        "dropout in the feed-forward step and behind attention, a probability",
        rule=PROBABILITY,
    )
    attention_dropout: float = vision(
        0.0, "dropout of attention's weights, a probability", rule=PROBABILITY
    )
    drop_path: float = vision(
        0.2,
        "stochastic depth: in training an image passes over a step of the last block with this "
        "probability, over one of the first with 0, and linearly between",
        rule=PROBABILITY,
    )
    init_std: float = vision(
        0.02, "standard deviation that linear layers begin with", rule=POSITIVE
    )
    checkpoint_activations: bool = vision(
        False, "keep only what blocks are given, and make the rest again in the backward"
    )


@dataclass(frozen=True)
class SwinExpertsConfig:
    """Which blocks have experts, beyond --moe-freq, and what these do not share with dense steps."""

    prefix: ClassVar[str] = "swin_"
    expert_stages: int = vision(
        2, "last stages whose blocks have experts, by --moe-freq within a stage", rule=whole(1)
    )
    expert_dropout: float = vision(
        0.1, "dropout of the experts' hidden layer, a probability", rule=PROBABILITY
    )


def of_stages(config: SwinConfig) -> list[tuple[int, int, int, int]]:
    """Return (blocks, model dimension, heads, position window or 0) of every stage.

    Raises:
        ValueError: lists that do not fit each other, or heads that do not divide a dimension.
    """
    depths, heads = numbers(config.depths), numbers(config.heads)
    windows = numbers(config.position_windows)
    windows = windows * len(depths) if len(windows) == 1 else windows
    for flag, text, found in (
        ("--swin-heads", config.heads, heads),
        ("--swin-position-windows", config.position_windows, windows),
    ):
        if len(found) != len(depths):
            raise ValueError(
                f"{flag} is {text!r}, but --swin-depths {config.depths!r} has {len(depths)} stages; "
                "give one number for each."
            )
    dims = [config.embed_dim * 2**i for i in range(len(depths))]
    for dim, count in zip(dims, heads, strict=True):
        if dim % count:
            raise ValueError(
                f"--swin-heads is {config.heads!r}, of which {count} does not divide a stage's model "
                f"dimension of {dim}; give divisors of {', '.join(map(str, dims))}."
            )
    return list(zip(depths, dims, heads, windows, strict=True))
