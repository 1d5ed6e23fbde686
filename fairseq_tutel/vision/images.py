"""Image data sets: folders of image files, or arrays. Images are decoded when they are read.

N images, C channels. A stored image is h x w, and the model's input is H x W.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.vision.options import IMAGENET_MEAN, IMAGENET_STD, ImageConfig, numbers_of

EXTENSIONS = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
# Larger labels are probably IDs or dates, and not class numbers.
MOST_CLASSES = 1_000_000
LONGEST = 200  # largest aspect ratio


class UnreadableImageError(Exception):
    """Raised if an image cannot be decoded; the message has the file name and the reason."""


def refusal(reason: str) -> str:
    """Return the error message for an unreadable image."""
    return f"{reason}; repair or remove the image, or add --image-errors skip."


class ImageFolder:
    """A data set of image files (.png, .jpg, .jpeg), one subfolder per class; both are sorted by name."""

    def __init__(self, folder: Path) -> None:
        _pillow()  # checked before workers start
        self.origin = folder
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
        if not names:
            raise ValueError(
                f"{folder} has no subfolders; put images into {folder}/CLASS, one subfolder for each class."
            )
        self.class_names: tuple[str, ...] | None = tuple(names)
        self._files: list[str] = []
        counts = []
        for name in names:
            files = sorted(
                entry.name
                for entry in os.scandir(folder / name)
                if entry.name.lower().endswith(EXTENSIONS) and entry.name[0] != "."
            )
            if not files:
                raise ValueError(
                    f"{folder / name} has no images ({', '.join(EXTENSIONS)}); add images, or remove the "
                    "folder."
                )
            self._files += [f"{name}/{file}" for file in files]
            counts.append(len(files))
        self.labels_N = np.repeat(np.arange(len(names)), counts)

    def __len__(self) -> int:
        return len(self._files)

    def name(self, i: int) -> str:
        """Return the path of image i."""
        return str(self.origin / self._files[i])

    def channels(self, i: int) -> int:
        """Return the number of channels of stored image i: 1 if it is grey, else 3."""
        with _opened(self.name(i)) as image:
            return 1 if image.mode in ("1", "L", "LA", "F") or image.mode[0] == "I" else 3

    def read(self, i: int, channels: int) -> Tensor:
        """Decode image i to the given number of channels, and return it as uint8 [C, h, w]."""
        return decoded(self.name(i), channels)


class ImageArrays:
    """A data set in an .npz file with arrays `images`, `labels` and, optionally, `classes` (class names).

    `images` is uint8 [N, h, w] or [N, h, w, C]; `labels` is int [N].
    """

    def __init__(self, path: Path) -> None:
        self.origin = path
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in ("images", "labels", "classes") if name in file}
        except MemoryError:
            raise
        except Exception as error:  # corrupt and foreign files raise many types
            raise ValueError(
                f"{path} is not an .npz file of plain arrays ({_reason(error)}); save it with numpy.savez."
            ) from None
        for name in ("images", "labels"):
            if name not in found:
                raise ValueError(f"{path} has no array named {name}; save images and labels in it.")
        images, labels = found["images"], found["labels"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
            raise ValueError(
                f"the array images of {path} is {images.dtype} {list(images.shape)}; give uint8 of shape "
                "[images, height, width] or [images, height, width, channels], without empty dimensions."
            )
        if images.ndim == 4 and images.shape[1] <= 4 < images.shape[3]:
            raise ValueError(
                f"the array images of {path} is {list(images.shape)}, probably with channels first; give "
                "[images, height, width, channels]."
            )
        if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"the array labels of {path} is {labels.dtype} {list(labels.shape)}; give a whole number "
                f"for each of the {len(images)} images."
            )
        for label in (labels.min(), labels.max()):
            if not 0 <= label < MOST_CLASSES:
                raise ValueError(
                    f"the array labels of {path} has {label}; number the classes consecutively from 0, and "
                    f"give fewer than {MOST_CLASSES:,} classes."
                )
        self._images = images if images.ndim == 4 else images[..., None]
        self.labels_N = labels.astype(np.int64)
        self.class_names = _names(found["classes"], path) if "classes" in found else None
        if self.class_names is not None and labels.max() >= len(self.class_names):
            raise ValueError(
                f"the array labels of {path} has {labels.max()}, but the array classes has only "
                f"{len(self.class_names)} names, for classes 0 to {len(self.class_names) - 1}; add names."
            )

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        """Return a name for image i: the path of the file and the index, such as train.npz[3]."""
        return f"{self.origin}[{i}]"

    def channels(self, i: int) -> int:
        """Return the number of channels, which is the same for all images."""
        return self._images.shape[3]

    def read(self, i: int, channels: int) -> Tensor:
        """Return image i as uint8 [C, h, w]."""
        if channels != self._images.shape[3]:
            raise ValueError(
                f"images of {self.origin} have {self._images.shape[3]} channels, but the model takes "
                f"{channels}; give images with {channels} channels, or change --image-channels."
            )
        return torch.from_numpy(self._images[i]).permute(2, 0, 1)


Images = ImageFolder | ImageArrays


def open_images(data: str, split: str) -> Images:
    """Return the images of a split: the folder DATA/SPLIT or the file DATA/SPLIT.npz."""
    if not data:
        raise ValueError("no data folder is given; name the folder that contains train and valid.")
    folder = Path(data) / split
    file = folder.with_name(f"{split}.npz")
    if folder.is_dir() == file.is_file():
        state = "neither exists" if not folder.is_dir() else "both exist"
        raise ValueError(
            f"the images of {split} are read from {folder} or {file}, but {state}; give one of them."
        )
    try:
        return ImageFolder(folder) if folder.is_dir() else ImageArrays(file)
    except OSError as error:  # no permission, cyclic links
        raise ValueError(
            f"{error.filename} cannot be read ({error.strerror}); repair or remove it."
        ) from None


def classes_of(images: Images) -> list[str]:
    """Return the class names of a training set; classes without names have their numbers as names."""
    names = list(images.class_names or map(str, range(int(images.labels_N.max()) + 1)))
    if len(names) < 2:
        raise ValueError(f"{images.origin} has only one class, {names[0]}; give two or more classes.")
    return names


def labels_among(images: Images, classes: Sequence[str]) -> np.ndarray:
    """Return each image's label as an index into `classes`, [N]; named classes are matched by name."""
    if images.class_names is None:
        if images.labels_N.max() >= len(classes):
            raise ValueError(
                f"the array labels of {images.origin} has {images.labels_N.max()}, but the training set "
                f"has {len(classes)} classes, 0 to {len(classes) - 1}; remove images of other classes."
            )
        return images.labels_N
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in images.class_names if name not in number_of]
    if unknown:
        if _same_by_number(classes, images.class_names):
            return images.labels_N
        raise ValueError(
            f"{images.origin} has the class {unknown[0]}, which is not one of the training set's "
            f"{len(classes)} classes, {classes[0]} to {classes[-1]}; remove the class, or train with it."
        )
    return np.array([number_of[name] for name in images.class_names])[images.labels_N]


def different_class(before: Sequence[str], now: Sequence[str]) -> tuple[int, str, str] | None:
    """Return the index and both names of the first class that differs, or None if the lists are equal.

    A list of numbers instead of names is equal to any list of the same length.
    """
    if not before or _same_by_number(before, now):
        return None
    pairs = enumerate(zip_longest(before, now, fillvalue="none"))
    return next(((i, old, new) for i, (old, new) in pairs if old != new), None)


def _same_by_number(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether one list has numbers instead of names, and both lists have the same length."""
    numbers = [str(i) for i in range(len(now))]
    is_alike = len(before) == len(now) and set(before) != set(now)
    return is_alike and numbers in (list(before), list(now))


def decoded(path: str, channels: int) -> Tensor:
    """Decode an image file; return uint8 [C, h, w], grey (C = 1) or RGB (C = 3).

    Raises:
        UnreadableImageError: the file cannot be decoded.
    """
    with _opened(path) as image:
        if image.mode[0] == "I":  # 16-bit grey, which Pillow would clip at 255
            image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.array(image.convert(MODES[channels]))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)


def fitted(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize an image to cover H x W and crop the center; return float32 [C, H, W] from 0 to 1."""
    image = pixels.float() / 255
    h, w = image.shape[1:]
    if (h, w) != (height, width):
        scale = max(height / h, width / w)
        covering = max(height, round(h * scale)), max(width, round(w * scale))
        if covering != (h, w):
            image = F.interpolate(image[None], covering, mode="bilinear", antialias=True)[0]
        top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
        image = image[:, top : top + height, left : left + width]
    return image


def normalisation(config: ImageConfig, channels: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation for normalizing images, [C, 1, 1] each."""
    found = []
    for name, default in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
        text = getattr(config, name)
        numbers = numbers_of(text) if text else default if channels == 3 else (0.5,)
        if len(numbers) not in (1, channels):
            raise ValueError(
                f"--image-{name} is {text}, which has {len(numbers)} numbers, but images have {channels} "
                "channels; give one number, or one per channel."
            )
        found.append(torch.tensor(numbers).expand(channels).view(-1, 1, 1))
    return found[0], found[1]


def _names(classes: np.ndarray, path: Path) -> tuple[str, ...]:
    values = classes.ravel().tolist()
    names = tuple(v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values)
    if classes.ndim != 1 or len(set(names)) < len(names):
        raise ValueError(
            f"the array classes of {path} is {classes.dtype} {list(classes.shape)} with {len(set(names))} "
            "different names; give a list of unique names."
        )
    return names


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ValueError(
            "reading image files needs Pillow, which is not installed; run pip install "
            "'fairseq-tutel[vision]'."
        ) from None
    return Image


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open an image with Pillow, which reads only the header; errors in the with block name the file."""
    pillow = _pillow()
    try:
        if not os.path.isfile(path) and os.path.exists(path):  # opening a pipe would block
            raise ValueError("not a regular file")
        with pillow.open(path) as image:
            (width, height), pixels = image.size, math.prod(image.size)
            # Such an image, resized to cover a square, would fill the memory.
            if max(image.size) > LONGEST * min(image.size):
                raise ValueError(f"{width} x {height} pixels; one side is over {LONGEST} times the other")
            if pixels > pillow.MAX_IMAGE_PIXELS:  # Pillow itself only warns
                raise ValueError(f"{pixels:,} pixels, more than {pillow.MAX_IMAGE_PIXELS:,}")
            yield image
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many types
        raise UnreadableImageError(f"{path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
