"""Random augmentation of training images.

All random numbers depend on (seed, epoch, image) only; see `draws_of`. Therefore an image is augmented in
the same way on every rank, in every worker, and after a resume.
"""

from typing import TYPE_CHECKING

import numpy as np

from fairseq_tutel.vision.options import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image


def draws_of(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random number generator for one image in one epoch."""
    return np.random.default_rng((seed, epoch, index))


def order_of(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """Return a random order of all images for one epoch, [N] int64."""
    # No image has this number, so the order is independent of all augmentations.
    return draws_of(seed, epoch, num_images).permutation(num_images)


def augmented(image: "Image", config: ImageConfig, draws: np.random.Generator) -> "Image":
    """Crop and flip an image randomly. A disabled option draws no random numbers."""
    from PIL import ImageOps

    if config.crop_padding:
        left, top = draws.integers(0, 2 * config.crop_padding, size=2, endpoint=True).tolist()
        box = (left, top, left + image.width, top + image.height)
        image = ImageOps.expand(image, config.crop_padding).crop(box)
    if config.flip and draws.random() < config.flip:
        image = ImageOps.mirror(image)
    return image
