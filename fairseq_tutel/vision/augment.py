"""Random augmentation of training images, and mixing of each image with the next image of the batch.

All random numbers depend on (seed, epoch, image) only; see `draws_of`. Therefore an image is augmented in
the same way on every rank, in every worker, and after a resume.

B images, C channels, H height and W width of an image.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from fairseq_tutel.vision.options import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image

# Random erasing (Zhong et al. 2017, section 3): range of area fractions, largest ratio of width to height.
ERASED, ASPECT = (0.02, 1 / 3), 10 / 3


Box = tuple[int, int, int, int]  # top, bottom, left, right


class Mixing(NamedTuple):
    """Describes how an image is mixed with the next image of the batch."""

    share: float  # weight of the image itself, from 0 to 1
    box: Box | None = None  # rectangle from the next image; None: both images are blended


def draws_of(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random number generator for one image in one epoch."""
    return np.random.default_rng((seed, epoch, index))


def order_of(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """Return a random order of all images for one epoch, [N] int64."""
    # No image has this number, so the order is independent of all augmentations.
    return draws_of(seed, epoch, num_images).permutation(num_images)


def augmented(image: "Image", config: ImageConfig, draws: np.random.Generator) -> "Image":
    """Crop, flip and recolor an image randomly. A disabled option draws no random numbers."""
    from PIL import ImageEnhance, ImageOps

    if config.crop_padding:
        left, top = draws.integers(0, 2 * config.crop_padding, size=2, endpoint=True).tolist()
        box = (left, top, left + image.width, top + image.height)
        image = ImageOps.expand(image, config.crop_padding).crop(box)
    if config.flip and draws.random() < config.flip:
        image = ImageOps.mirror(image)
    if config.jitter:
        for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            image = change(image).enhance(draws.uniform(1 - config.jitter, 1 + config.jitter))
    return image


def erased(image: Tensor, probability: float, draws: np.random.Generator) -> Tensor:
    """With a given probability, set a random rectangle of a normalized image [C, H, W] to 0 (the mean)."""
    if not probability or draws.random() >= probability:
        return image
    area = draws.uniform(*ERASED)
    aspect = math.exp(draws.uniform(-math.log(ASPECT), math.log(ASPECT)))
    height, width = image.shape[1:]
    sides = math.sqrt(area / aspect), math.sqrt(area * aspect)
    top, bottom, left, right = _box(*sides, height, width, draws)
    image = image.clone()
    image[:, top:bottom, left:right] = 0
    return image


def draw_mixing(config: ImageConfig, height: int, width: int, draws: np.random.Generator) -> Mixing | None:
    """Return random parameters of mixup or cutmix for an image, or None if both are disabled."""
    if not config.mixes:
        return None
    cuts = draws.random() < 0.5 if config.mixup and config.cutmix else config.cutmix > 0
    alpha = config.cutmix if cuts else config.mixup
    share = float(draws.beta(alpha, alpha))
    if not cuts:
        return Mixing(share)
    side = math.sqrt(1 - share)
    box = top, bottom, left, right = _box(side, side, height, width, draws)
    return Mixing(1 - (bottom - top) * (right - left) / (height * width), box)


def mixed(images_BCHW: Tensor, mixings: list[Mixing]) -> Tensor:
    """Return the batch with each image mixed with the next image, and the last image with the first.

    Sources: mixup, Zhang et al. 2018, equation 1; cutmix, Yun et al. 2019, section 3.1. Each image has its
    own weight. In both papers, all images of a batch have the same weight.
    """
    next_BCHW = images_BCHW.roll(-1, 0)
    blended_BCHW = images_BCHW.clone()
    for b, mixing in enumerate(mixings):
        if mixing.box is None:
            blended_BCHW[b].lerp_(next_BCHW[b], 1 - mixing.share)
        else:
            top, bottom, left, right = mixing.box
            blended_BCHW[b, :, top:bottom, left:right] = next_BCHW[b, :, top:bottom, left:right]
    return blended_BCHW


def _box(
    height_share: float, width_share: float, height: int, width: int, draws: np.random.Generator
) -> Box:
    """Return a rectangle around a random pixel, clipped to the image; the shares are its relative size."""
    rows, columns = round(height_share * height), round(width_share * width)
    top, left = int(draws.integers(height)) - rows // 2, int(draws.integers(width)) - columns // 2
    return max(top, 0), min(top + rows, height), max(left, 0), min(left + columns, width)
