"""Images in files and arrays: decoding, resizing, and classes."""

import numpy as np
import pytest
import torch
from PIL import Image

from fairseq_tutel.vision.images import (
    augmented,
    different_class,
    draws_of,
    fitted,
    labels_among,
    open_images,
    order_of,
    tensor_of,
)
from fairseq_tutel.vision.options import ImageConfig

RAMP = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def folder_of(tmp_path, files, split="train"):
    """Write a dict {name: Pillow image or bytes} as files; return the data folder."""
    for name, image in files.items():
        path = tmp_path / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image) if isinstance(image, bytes) else image.save(path)
    return str(tmp_path)


def arrays_of(tmp_path, split="train", **arrays):
    np.savez(tmp_path / f"{split}.npz", **arrays)
    return str(tmp_path)


def test_a_folder_and_arrays_hold_the_same_images(tmp_path):
    images = np.stack([RAMP, RAMP[::-1], RAMP // 2])
    names = ("cat/b.png", "ant/x.PNG", "cat/a.png")
    files = {name: Image.fromarray(image) for name, image in zip(names, images, strict=True)}
    folder = open_images(folder_of(tmp_path / "f", files), "train")
    (tmp_path / "a").mkdir()
    arrays = open_images(arrays_of(tmp_path / "a", images=images[[1, 2, 0]], labels=[0, 1, 1]), "train")
    assert [folder.name(i)[-9:] for i in range(3)] == ["ant/x.PNG", "cat/a.png", "cat/b.png"]
    assert folder.class_names == ["ant", "cat"] and arrays.class_names == ["0", "1"]
    assert folder.channels(0) == arrays.channels(0) == 1
    assert folder.labels_N.tolist() == arrays.labels_N.tolist() == [0, 1, 1]
    for i in range(3):
        assert torch.equal(tensor_of(folder.read(i, 1)), tensor_of(arrays.read(i, 1)))
    assert labels_among(folder, ["bee", "cat", "ant"]).tolist() == [2, 1, 1]
    assert labels_among(folder, ["0", "1"]).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="has the class ant, which is not one of the training set's"):
        labels_among(folder, ["bee", "cat", "dog"])


def test_classes_differ_by_name_and_order_if_they_have_names():
    assert different_class(["ant", "bee"], ["ant", "bee"]) is None
    assert different_class(["ant", "bee"], ["bee", "ant"]) == (0, "ant", "bee")
    assert different_class(["ant"], ["ant", "bee"]) == (1, "none", "bee")
    assert different_class(["0", "1"], ["ant", "bee"]) is None is different_class(["b", "a"], ["0", "1"])
    numbers = [str(i) for i in range(11)]  # folder names are sorted as text
    assert different_class(numbers, sorted(numbers)) == (2, "2", "10")


def test_every_mode_becomes_grey_or_rgb(tmp_path):
    grey = Image.fromarray(RAMP)
    made = {f"a/{mode}.png": grey.convert(mode) for mode in ("L", "LA", "P", "RGB", "RGBA")}
    made["a/I16.png"] = Image.fromarray(RAMP.astype(np.uint16) * 256 + 7)
    images = open_images(folder_of(tmp_path, made), "train")
    for i in range(len(images)):
        assert images.channels(i) == (1 if images.name(i).endswith(("L.png", "LA.png", "I16.png")) else 3)
        for channels in (1, 3):
            found = tensor_of(images.read(i, channels)) * 255
            assert found.shape == (channels, 6, 8)
            assert (found - torch.from_numpy(RAMP)).abs().max() <= 1, images.name(i)


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_the_error_for_an_unreadable_image_has_its_name(tmp_path, kind):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    content = {"truncated": (tmp_path / "whole.png").read_bytes()[:900], "empty": b"", "text": b"no image"}
    images = open_images(folder_of(tmp_path, {"a/x.png": content[kind]}), "train")
    with pytest.raises(ValueError, match=r"^\S+a/x.png cannot be read as an image \("):
        images.read(0, 1)


def test_an_image_is_resized_to_cover_the_input_and_cropped_around_its_center():
    image = Image.effect_noise((64, 40), 50)
    assert torch.equal(tensor_of(fitted(image, 40, 64)), tensor_of(image))
    half = tensor_of(image.resize((32, 20), Image.Resampling.BILINEAR))[:, :, 6:26]
    assert (tensor_of(fitted(image, 20, 20)) - half).abs().max() < 2 / 255


OK = {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 1])}


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": np.zeros((2, 4, 4))},
        {"images": np.zeros((2, 3, 4, 4), np.uint8)},
        {"labels": np.zeros(3, int)},
        {"labels": np.array([0, -1])},
        {"classes": np.array(["a"])},
    ],
)
def test_arrays_with_wrong_shapes_or_types_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"train\.npz has images of .* labels from"):
        open_images(arrays_of(tmp_path, **{**OK, **wrong}), "train")


def test_a_split_is_a_folder_of_classes_or_a_file(tmp_path):
    with pytest.raises(ValueError, match="give exactly one of them"):
        open_images(str(tmp_path), "train")
    (tmp_path / "train" / "dog").mkdir(parents=True)
    with pytest.raises(ValueError, match="train needs one subfolder for each class"):
        open_images(str(tmp_path), "train")
    with pytest.raises(ValueError, match="give exactly one of them"):
        open_images(arrays_of(tmp_path, **OK), "train")


PIXELS = torch.randint(256, (3, 9, 7), generator=torch.Generator().manual_seed(1)) / 255
IMAGE = Image.fromarray((PIXELS * 255).round().byte().permute(1, 2, 0).numpy())
ALL = ImageConfig(crop_padding=2, flip=0.5)


def each(function, count=60):
    return [function(draws_of(1, 2, i)) for i in range(count)]


def test_without_augmentation_options_the_image_is_unchanged():
    draws = draws_of(1, 2, 3)
    assert augmented(IMAGE, ImageConfig(), draws) is IMAGE
    assert draws.random() == draws_of(1, 2, 3).random()


def test_augmentation_depends_only_on_seed_epoch_and_image():
    keys = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    made = {key: augmented(IMAGE, ALL, draws_of(*key)).tobytes() for key in keys}
    assert all(augmented(IMAGE, ALL, draws_of(*key)).tobytes() == made[key] for key in reversed(keys))
    assert len({*made.values()}) == 4
    orders = [order_of(seed, epoch, 50) for seed, epoch in ((1, 1), (1, 2), (2, 1))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_crop_is_a_window_of_the_padded_image():
    padded = torch.zeros(3, 13, 11)
    padded[:, 2:11, 2:9] = PIXELS
    windows = [padded[:, y : y + 9, x : x + 7] for y in range(5) for x in range(5)]
    config = ImageConfig(crop_padding=2)
    found = [
        next(i for i, window in enumerate(windows) if torch.equal(window, tensor_of(image)))
        for image in each(lambda draws: augmented(IMAGE, config, draws), 200)
    ]
    assert set(found) == set(range(25))


def test_half_of_the_images_are_mirrored():
    found = [tensor_of(image) for image in each(lambda d: augmented(IMAGE, ImageConfig(flip=0.5), d))]
    flips = [torch.equal(image, PIXELS.flip(2)) for image in found]
    assert all(torch.equal(image, PIXELS) for image, flip in zip(found, flips, strict=True) if not flip)
    assert 15 < sum(flips) < 45
