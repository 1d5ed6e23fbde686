"""Images changed at random: each option does what it says, by (seed, epoch, image) alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from fairseq_tutel.vision.augment import augmented, draw_mixing, draws_of, erased, mixed, order_of
from fairseq_tutel.vision.images import tensor_of
from fairseq_tutel.vision.options import ImageConfig

PIXELS = torch.randint(256, (3, 9, 7), generator=torch.Generator().manual_seed(1)) / 255
IMAGE = Image.fromarray((PIXELS * 255).round().byte().permute(1, 2, 0).numpy())
ALL = ImageConfig(crop_padding=2, flip=0.5, jitter=0.4, erase=0.5, mixup=0.2, cutmix=1.0)


def each(function, count=60):
    return [function(draws_of(1, 2, i)) for i in range(count)]


def test_no_option_changes_and_draws_nothing():
    draws = draws_of(1, 2, 3)
    assert augmented(IMAGE, ImageConfig(), draws) is IMAGE
    assert erased(PIXELS, 0, draws) is PIXELS
    assert draw_mixing(ImageConfig(), 9, 7, draws) is None
    assert draws.random() == draws_of(1, 2, 3).random()


def test_only_seed_epoch_and_image_decide():
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


def test_jitter_leaves_grey_images_grey():
    grey = IMAGE.convert("L").convert("RGB")
    found = [tensor_of(image) for image in each(lambda d: augmented(grey, ImageConfig(jitter=0.5), d))]
    assert all(torch.equal(image[0], image[2]) for image in found)
    assert len({image.sum().item() for image in found}) > 50


def test_erasing_leaves_the_mean_in_a_rectangle():
    image = PIXELS.repeat(1, 4, 4) + 1
    found = [e != image for e in each(lambda draws: erased(image, 0.5, draws), 200)]
    areas = [gone[0].float().mean().item() for gone in found if gone.any()]
    assert 60 < len(areas) < 140 and max(areas) < 0.36
    for gone in found:
        rows, columns = gone[0].any(1), gone[0].any(0)
        assert torch.equal(gone, (rows[:, None] & columns).expand(3, -1, -1))


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_images_are_mixed_with_the_next_one(options):
    images_BCHW = torch.rand(40, 3, 9, 7, generator=torch.Generator().manual_seed(2))
    mixings = each(lambda draws: draw_mixing(ImageConfig(**options), 9, 7, draws), 40)
    found = mixed(images_BCHW, mixings)
    for b, mixing in enumerate(mixings):
        own, other = images_BCHW[b], images_BCHW[(b + 1) % 40]
        if mixing.box is None:
            assert torch.allclose(found[b], mixing.share * own + (1 - mixing.share) * other, atol=1e-6)
        else:
            is_own = (found[b] == own).all(0)
            assert is_own.float().mean().item() == pytest.approx(mixing.share)
            assert torch.equal(found[b], torch.where(is_own, own, other))
    boxes = sum(mixing.box is not None for mixing in mixings)
    assert boxes == {1: 40 * ("cutmix" in options)}.get(len(options), boxes)
    assert len(options) == 1 or 8 < boxes < 32
    assert 0.3 < np.mean([mixing.share for mixing in mixings]) < 0.8
