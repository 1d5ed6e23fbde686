"""Image data sets are folders of image files, or arrays. Pillow decodes an image file at each access.

All random numbers depend only on (seed, epoch, image); see `draws_of`. An image is therefore augmented in
the same way on every rank, in every worker, and after a resume. Shape suffixes are N (images), C (channels,
1 or 3), and H and W (pixels of the model's input).
"""

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairseq_tutel.vision.options import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image  # The package's extra `vision` installs Pillow.

EXTENSIONS = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
# Mean and standard deviation of ImageNet's photos, for pixels from 0 to 1, in the order red, green, blue.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder:
    """A data set of image files (.png, .jpg, .jpeg), sorted by name, in one subfolder per class."""

    def __init__(self, folder: Path) -> None:
        self.origin = folder
        found = [
            (path.name, sorted(e.name for e in os.scandir(path) if e.name.lower().endswith(EXTENSIONS)))
            for path in sorted(folder.iterdir())
            if path.is_dir()
        ]
        if not found or not all(files for _, files in found):
            raise ValueError(
                f"{folder} needs one subfolder for each class, with {', '.join(EXTENSIONS)} files."
            )
        self.class_names = [name for name, _ in found]
        self._files = [f"{name}/{file}" for name, files in found for file in files]
        self.labels_N = np.repeat(np.arange(len(found)), [len(files) for _, files in found])

    def __len__(self) -> int:
        return len(self._files)

    def name(self, i: int) -> str:
        """Return the path of image i in the data set."""
        return str(self.origin / self._files[i])

    def channels(self, i: int) -> int:
        """Return the number of channels of stored image i, 1 if the image is gray, else 3."""
        from PIL import Image

        with Image.open(self.name(i)) as image:
            return 1 if Image.getmodebase(image.mode) == "L" else 3

    def read(self, i: int, channels: int) -> "Image":
        """Decode image i of the data set to the given number of channels."""
        return decoded(self.name(i), channels)


class ImageArrays:
    """A data set in an .npz file with arrays `images`, `labels` and, optionally, `classes` (class names).

    The array `images` is uint8 [N, h, w] or [N, h, w, 3], and `labels` is int [N]. Default class names are
    numbers.
    """

    def __init__(self, path: Path) -> None:
        self.origin = path
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
            names = file["classes"].astype(str).tolist() if "classes" in file else None
        self.class_names = names or [str(i) for i in range(int(labels.max()) + 1)]
        is_grey_or_rgb = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        is_class_N = (labels >= 0) & (labels < len(self.class_names))
        if not (
            images.dtype == np.uint8
            and is_grey_or_rgb
            and labels.shape == images.shape[:1]
            and is_class_N.all()
        ):
            raise ValueError(
                f"{path} has images of {images.dtype} {list(images.shape)} and {len(labels)} labels from "
                f"{labels.min()} to {labels.max()}; give uint8 of shape [images, height, width] or "
                "[images, height, width, 3], and the class of each image, from 0."
            )
        self._images, self.labels_N = images, labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        """Return a name for image i: the path of the .npz file and the index, such as train.npz[3]."""
        return f"{self.origin}[{i}]"

    def channels(self, i: int) -> int:
        """Return the number of channels, which is the same for all images of the .npz file."""
        return 3 if self._images.ndim == 4 else 1

    def read(self, i: int, channels: int) -> "Image":
        """Return image i of the data set with the given number of channels."""
        from PIL import Image

        return Image.fromarray(self._images[i]).convert(MODES[channels])


Images = ImageFolder | ImageArrays


def open_images(data: str, split: str) -> Images:
    """Return the images of a split, from the folder DATA/SPLIT or the file DATA/SPLIT.npz."""
    import PIL  # noqa: F401 - without Pillow, fail now and not in a worker

    folder = Path(data) / split
    file = folder.with_name(f"{split}.npz")
    if folder.is_dir() == file.is_file():
        raise ValueError(
            f"the images of {split} are read from {folder} or {file}; give exactly one of them."
        )
    return ImageFolder(folder) if folder.is_dir() else ImageArrays(file)


def labels_among(images: Images, classes: Sequence[str]) -> np.ndarray:
    """Return each image's label [N] as an index into `classes`; named classes are matched by name."""
    if _same_by_number(classes, images.class_names):
        return images.labels_N
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in images.class_names if name not in number_of]
    if unknown:
        raise ValueError(
            f"{images.origin} has the class {unknown[0]}, which is not one of the training set's "
            f"{len(classes)} classes, {classes[0]} to {classes[-1]}; remove the class, or train with it."
        )
    return np.array([number_of[name] for name in images.class_names])[images.labels_N]


def different_class(before: Sequence[str], now: Sequence[str]) -> tuple[int, str, str] | None:
    """Return the index and both names of the first different class, or None if the lists are equal.

    A list of numbers instead of class names is equal to any list of the same length.
    """
    if not before or _same_by_number(before, now):
        return None
    pairs = enumerate(zip_longest(before, now, fillvalue="none"))
    return next(((i, old, new) for i, (old, new) in pairs if old != new), None)


def _same_by_number(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether just one list has numbers instead of class names, and the lists have equal lengths."""
    numbers = [str(i) for i in range(len(now))]
    is_alike = len(before) == len(now) and set(before) != set(now)
    return is_alike and numbers in (list(before), list(now))


def decoded(path: str, channels: int) -> "Image":
    """Decode an image file to gray (1 channel) or RGB (3); raise ValueError if the file is unreadable."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            image: Image.Image = file
            if image.mode[0] == "I":  # Pillow would clip 16-bit gray at 255.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return image.convert(MODES[channels])
    except (OSError, SyntaxError, ValueError) as error:  # The file may be truncated.
        raise ValueError(f"{path} cannot be read as an image ({error}); repair or remove it.") from error


def fitted(image: "Image", height: int, width: int) -> "Image":
    """Resize an image to cover H x W pixels, and crop the center."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def tensor_of(image: "Image") -> Tensor:
    """Return the pixels of an image as float32 [C, H, W] from 0 to 1."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1).float() / 255


def statistics(channels: int) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation [C, 1, 1] of ImageNet's pixels; both are 0.5 for 1 channel."""
    values = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,), (0.5,))
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in values)
    return mean, std


def normalized(pixels: Tensor) -> Tensor:
    """Normalize pixels [C, H, W] by the mean and standard deviation of `statistics`."""
    mean, std = statistics(pixels.shape[-3])
    return (pixels - mean) / std


def draws_of(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random number generator for one image in one epoch."""
    return np.random.default_rng((seed, epoch, index))


def order_of(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """Return a random order of all images for one epoch, [N] int64."""
    # No image has the index num_images, so the order of images is independent of all augmentations.
    return draws_of(seed, epoch, num_images).permutation(num_images)


def augmented(image: "Image", config: ImageConfig, draws: np.random.Generator) -> "Image":
    """Crop and flip an image at random. A disabled augmentation draws no random numbers."""
    from PIL import ImageOps

    if config.crop_padding:
        left, top = draws.integers(0, 2 * config.crop_padding, size=2, endpoint=True).tolist()
        box = (left, top, left + image.width, top + image.height)
        image = ImageOps.expand(image, config.crop_padding).crop(box)
    if config.flip and draws.random() < config.flip:
        image = ImageOps.mirror(image)
    return image
