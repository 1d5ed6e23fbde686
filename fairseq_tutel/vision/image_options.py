"""The table of options of the task image_classification: what an image becomes before a model sees it."""

import math
from dataclasses import dataclass
from typing import ClassVar

from fairseq_tutel.options.option import AT_LEAST_0, NOT_NEGATIVE, Rule, option

SHARE: Rule = (lambda v: 0 <= v <= 1, "give a number from 0 to 1")
# What photos of ImageNet are normalised by, in shares of full brightness; red, green, blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def numbers_of(text: str) -> tuple[float, ...]:
    """Return the finite numbers of a list with commas; none of one that is empty or no such list."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()


NUMBERS: Rule = (
    lambda v: v == "" or bool(numbers_of(v)),
    "give a number, or numbers of all channels such as 0.5,0.5,0.5",
)
POSITIVE_NUMBERS: Rule = (
    lambda v: v == "" or min(numbers_of(v), default=0) > 0,
    "give a number above 0, or numbers of all channels such as 0.5,0.5,0.5",
)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Options of a task on images."""

    prefix: ClassVar[str] = "image_"

    size: int = option(
        0,
        "height and width that an image is resized and cropped to around its centre; 0: those of the first "
        "image of the training set, or of its array",
        of="task",
        theme="Images",
        unit="pixels",
        rule=(lambda v: 0 <= v <= 16384, "give a whole number from 0 to 16384"),
    )
    channels: int = option(
        0,
        "1 makes images of files grey, 3 makes them red, green and blue; 0: as the first image of the "
        "training set is",
        of="task",
        theme="Images",
        rule=(lambda v: v in (0, 1, 3), "give 0, 1 or 3"),
    )
    mean: str = option(
        "",
        "what is taken from a channel's values, which go from 0 to 1: one number, or one of each channel; "
        f"empty: {', '.join(map(str, IMAGENET_MEAN))} (ImageNet's) for 3 channels, else 0.5",
        of="task",
        theme="Images",
        rule=NUMBERS,
    )
    std: str = option(
        "",
        "what the result is divided by, likewise; "
        f"empty: {', '.join(map(str, IMAGENET_STD))} for 3 channels, else 0.5",
        of="task",
        theme="Images",
        rule=POSITIVE_NUMBERS,
    )
    errors: str = option(
        "refuse",
        "what an image that cannot be decoded does: end the command, or be named, counted and left out",
        of="task",
        theme="Images",
        choices=("refuse", "skip"),
    )
    crop_padding: int = option(
        0,
        "in training, black on every side from which an image of the same size is cut out at random",
        of="task",
        theme="Images",
        unit="pixels",
        rule=AT_LEAST_0,
    )
    flip: float = option(
        0.0,
        "in training, the probability that an image is mirrored, left to right",
        of="task",
        theme="Images",
        rule=SHARE,
    )
    jitter: float = option(
        0.0,
        "in training, brightness, contrast and, of colours, saturation times a number from 1 less to 1 "
        "more than this",
        of="task",
        theme="Images",
        rule=SHARE,
    )
    erase: float = option(
        0.0,
        "in training, the probability that a rectangle of 2 to 33 % of the area becomes the mean",
        of="task",
        theme="Images",
        rule=SHARE,
    )
    mixup: float = option(
        0.0,
        "in training, each image is blended with the next one of its batch, with a share drawn from "
        "Beta(a, a) of this a; 0: not",
        of="task",
        theme="Images",
        rule=NOT_NEGATIVE,
    )
    cutmix: float = option(
        0.0,
        "in training, each image gets a rectangle of the next one of its batch, whose share of the area is "
        "drawn from Beta(a, a) of this a; 0: not; beside --image-mixup, one of both for each image",
        of="task",
        theme="Images",
        rule=NOT_NEGATIVE,
    )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed in training."""
        return self.mixup > 0 or self.cutmix > 0
