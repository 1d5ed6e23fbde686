"""The table of options of the task image_classification: preprocessing and augmentation."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fairseq_tutel.options.option import AT_LEAST_0, NOT_NEGATIVE, Rule, option

image_option = partial(option, of="task", theme="Images")
SHARE: Rule = (lambda v: 0 <= v <= 1, "give a number from 0 to 1")
# Mean and standard deviation of ImageNet's photos, from 0 to 1; red, green, blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def numbers_of(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas, or () if any is missing or not finite."""
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
    """Options of the task image_classification."""

    prefix: ClassVar[str] = "image_"

    size: int = image_option(
        0,
        "height and width to which images are resized and center-cropped; 0: those of the first training "
        "image",
        unit="pixels",
        rule=(lambda v: 0 <= v <= 16384, "give a whole number from 0 to 16384"),
    )
    channels: int = image_option(
        0,
        "channels of images from files: 1 grey, 3 RGB; 0: those of the first training image",
        rule=(lambda v: v in (0, 1, 3), "give 0, 1 or 3"),
    )
    mean: str = image_option(
        "",
        "mean that normalization subtracts from values of 0 to 1: one number, or one per channel; "
        f"empty: {', '.join(map(str, IMAGENET_MEAN))} (ImageNet's) for 3 channels, else 0.5",
        rule=NUMBERS,
    )
    std: str = image_option(
        "",
        "standard deviation by which normalization divides: one number, or one per channel; "
        f"empty: {', '.join(map(str, IMAGENET_STD))} for 3 channels, else 0.5",
        rule=POSITIVE_NUMBERS,
    )
    errors: str = image_option(
        "refuse",
        "action for images that cannot be decoded: end the command, or log, count and skip them",
        choices=("refuse", "skip"),
    )
    crop_padding: int = image_option(
        0,
        "random crop in training: width of the black border that is added before the crop",
        unit="pixels",
        rule=AT_LEAST_0,
    )
    flip: float = image_option(0.0, "probability of a horizontal flip in training", rule=SHARE)
    jitter: float = image_option(
        0.0,
        "color jitter in training: random factors of brightness, contrast and saturation, from 1 minus "
        "this to 1 plus this",
        rule=SHARE,
    )
    erase: float = image_option(
        0.0,
        "random erasing in training: probability that a rectangle (2 to 33 % of the area) becomes the mean",
        rule=SHARE,
    )
    mixup: float = image_option(
        0.0,
        "mixup in training: blend each image with the next one of its batch, by a share drawn from "
        "Beta(a, a) for this a; 0: off",
        rule=NOT_NEGATIVE,
    )
    cutmix: float = image_option(
        0.0,
        "cutmix in training: replace a rectangle of each image by the next one of its batch, its area "
        "drawn from Beta(a, a) for this a; 0: off; with --image-mixup, each image gets one of both",
        rule=NOT_NEGATIVE,
    )

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is enabled."""
        return self.mixup > 0 or self.cutmix > 0
