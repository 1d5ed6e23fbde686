"""Images in files: what is read, how it is brought into shape, and what refuses what cannot be."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from fairseq_tutel.vision.images import (
    UnreadableImageError,
    classes_of,
    different_class,
    fitted,
    labels_among,
    normalisation,
    open_images,
)
from fairseq_tutel.vision.options import ImageConfig

RAMP = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def folder_of(tmp_path, files, split="train"):
    """Write {name: Pillow's image, or bytes} and return the data folder."""
    for name, image in files.items():
        path = tmp_path / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image) if isinstance(image, bytes) else image.save(path)
    return str(tmp_path)


def arrays_of(tmp_path, split="train", **arrays):
    np.savez(tmp_path / f"{split}.npz", **arrays)
    return str(tmp_path)


def test_a_folder_holds_what_an_array_does(tmp_path):
    images = np.stack([RAMP, RAMP[::-1], RAMP // 2])
    names = ("cat/b.png", "ant/x.PNG", "cat/a.png")
    folder = open_images(
        folder_of(tmp_path / "f", {n: Image.fromarray(i) for n, i in zip(names, images, strict=True)}),
        "train",
    )
    (tmp_path / "a").mkdir()
    arrays = open_images(arrays_of(tmp_path / "a", images=images[[1, 2, 0]], labels=[0, 1, 1]), "train")
    assert [folder.name(i)[-9:] for i in range(3)] == ["ant/x.PNG", "cat/a.png", "cat/b.png"]
    assert classes_of(folder) == ["ant", "cat"] and classes_of(arrays) == ["0", "1"]
    assert folder.channels(0) == arrays.channels(0) == 1
    assert folder.labels_N.tolist() == arrays.labels_N.tolist() == [0, 1, 1]
    for i in range(3):
        assert torch.equal(folder.read(i, 1), arrays.read(i, 1))
    assert labels_among(folder, ["bee", "cat", "ant"]).tolist() == [2, 1, 1]
    assert labels_among(folder, ["0", "1"]).tolist() == [0, 1, 1]


def test_classes_differ_by_name_and_order_where_they_have_names():
    assert different_class(["ant", "bee"], ["ant", "bee"]) is None
    assert different_class(["ant", "bee"], ["bee", "ant"]) == (0, "ant", "bee")
    assert different_class(["ant", "bee"], ["ant", "cat"]) == (1, "bee", "cat")
    assert different_class(["ant"], ["ant", "bee"]) == (1, "none", "bee")
    assert different_class(["0", "1"], ["0"]) == (1, "1", "none")
    assert different_class(["0", "1"], ["ant", "bee"]) is None is different_class(["b", "a"], ["0", "1"])
    assert different_class([], ["ant", "bee"]) is None
    numbers = [str(i) for i in range(11)]  # of folders they are sorted as words
    assert different_class(numbers, sorted(numbers)) == (2, "2", "10")


def test_every_mode_becomes_what_is_asked_for(tmp_path):
    grey = Image.fromarray(RAMP)
    made = {
        "a/l.png": grey,
        "a/i16.png": Image.fromarray(RAMP.astype(np.uint16) * 256 + 7),
        "a/la.png": grey.convert("LA"),
        "a/p.png": grey.convert("P"),
        "a/rgba.png": grey.convert("RGBA"),
        "a/rgb.png": grey.convert("RGB"),
        "a/cmyk.jpg": Image.merge("CMYK", [Image.new("L", (8, 6), v) for v in (0, 0, 0, 55)]),
    }
    images = open_images(folder_of(tmp_path, made), "train")
    grey_ones = {"l.png": 1, "i16.png": 1, "la.png": 1}
    for i in range(len(images)):
        name = images.name(i).rpartition("/")[2]
        assert images.channels(i) == grey_ones.get(name, 3), name
        expected = torch.full((6, 8), 200) if name == "cmyk.jpg" else torch.from_numpy(RAMP)
        for channels in (1, 3):
            found = images.read(i, channels)
            assert found.shape == (channels, 6, 8) and found.dtype == torch.uint8
            assert (found.int() - expected.int()).abs().max() <= 1, name


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_broken_image_is_named_with_its_reason(tmp_path, monkeypatch):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "empty": b"", "text": b"no image", "torn": whole[:30]}
    data = folder_of(tmp_path, {f"a/{name}.png": content for name, content in broken.items()})
    large = {"a/huge.png": Image.new("L", (90, 90)), "a/long.png": Image.new("L", (1, 300))}
    folder_of(tmp_path, large)
    os.mkfifo(tmp_path / "train" / "a" / "pipe.png")
    images = open_images(data, "train")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    assert len(images) == 7
    for i in range(7):
        with pytest.raises(UnreadableImageError, match=rf"^{images.name(i)}: \S"):
            images.read(i, 1)


def test_an_image_covers_its_size_and_is_cropped_around_its_centre():
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 64), dtype=np.uint8))
    assert torch.equal(fitted(pixels[None], 40, 64)[0] * 255, pixels.float())
    half = Image.fromarray(pixels.numpy()).resize((32, 20), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(half)).float()[:, 6:26]
    assert (fitted(pixels[None], 20, 20)[0] * 255 - expected).abs().max() < 1
    assert fitted(pixels[None, :2, :3], 5, 7).shape == (1, 5, 7)


def test_normalisation_is_one_number_or_one_of_each_channel():
    assert normalisation(ImageConfig(), 1)[0].flatten().tolist() == [0.5]
    assert normalisation(ImageConfig(), 3)[1].flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
    mean, std = normalisation(ImageConfig(mean="0.1", std="1,2,3"), 3)
    assert mean.shape == std.shape == (3, 1, 1) and std[2] == 3 and mean[2] == mean[0]
    with pytest.raises(
        ValueError, match=r"--image-mean is 1,2, which has 2 numbers, but images have 3 channels; give"
    ):
        normalisation(ImageConfig(mean="1,2"), 3)


OK = {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 1])}
BAD_ARRAYS = {
    "no array named labels; save": {"labels": None},
    r"images of .* is float64 \[2, 4, 4\]; give uint8": {"images": np.zeros((2, 4, 4))},
    r"images of .* is uint8 \[2, 4\]; give": {"images": np.zeros((2, 4), np.uint8)},
    r"labels of .* is int64 \[3\]; give a whole number for each of the 2": {"labels": np.zeros(3, int)},
    r"labels of .* is float64 \[2\]; give": {"labels": np.zeros(2)},
    r"labels of .* has -1; number the": {"labels": np.array([0, -1])},
    r"labels of .* has 20261123; number the classes .* fewer than": {"labels": np.array([0, 20261123])},
    r"images of .* is \[2, 3, 8, 8\], probably with channels first": {
        "images": np.zeros((2, 3, 8, 8), np.uint8)
    },
    r"classes of .* \[3\] with 2 different names; give": {"classes": np.array(["a", "a", "b"])},
    r"classes of .* \[\] with 1 different names; give": {"classes": np.array("a")},
    r"labels of .* has 1, but the array classes has only 1 names,": {"classes": np.array(["a"])},
    r"is not an .npz file of plain arrays \(Object arrays": {"classes": np.array(["a", None])},
    r"has only one class, 0; give two": {"labels": np.array([0, 0])},
}


@pytest.mark.parametrize("sentence", BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(tmp_path, sentence):
    arrays = {k: v for k, v in {**OK, **BAD_ARRAYS[sentence]}.items() if v is not None}
    with pytest.raises(ValueError, match=sentence):
        classes_of(open_images(arrays_of(tmp_path, **arrays), "train"))


def test_what_is_not_there_or_does_not_belong_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither exists; give one"):
        open_images(str(tmp_path), "train")
    (tmp_path / "train.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"is not an .npz file"):
        open_images(str(tmp_path), "train")
    arrays = open_images(arrays_of(tmp_path, **OK), "train")
    with pytest.raises(ValueError, match="1 channels, but the model takes 3; give images with 3"):
        arrays.read(0, 3)
    with pytest.raises(ValueError, match=r"has 1, but the training set has 1 classes, 0 to 0"):
        labels_among(arrays, ["only"])
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="both exist; give one"):
        open_images(str(tmp_path), "train")
    (tmp_path / "valid").mkdir()
    with pytest.raises(ValueError, match=r"has no subfolders; put images into .*valid/CLASS"):
        open_images(str(tmp_path), "valid")
    (tmp_path / "valid" / "dog").mkdir()
    with pytest.raises(ValueError, match=r"valid/dog has no images \(.png, .jpg, .jpeg\); add"):
        open_images(str(tmp_path), "valid")
    data = folder_of(tmp_path, {"dog/a.png": Image.fromarray(RAMP)}, "valid")
    with pytest.raises(
        ValueError, match="has the class dog, which is not one of the training set's 2 classes, ant"
    ):
        labels_among(open_images(data, "valid"), ["ant", "cat"])
