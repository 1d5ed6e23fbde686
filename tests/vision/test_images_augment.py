"""Images changed at random: each option does what it says, by (seed, epoch, image) alone."""

import torch
from PIL import Image

from fairseq_tutel.vision.augment import augmented, draws_of, order_of
from fairseq_tutel.vision.images import tensor_of
from fairseq_tutel.vision.options import ImageConfig

PIXELS = torch.randint(256, (3, 9, 7), generator=torch.Generator().manual_seed(1)) / 255
IMAGE = Image.fromarray((PIXELS * 255).round().byte().permute(1, 2, 0).numpy())
ALL = ImageConfig(crop_padding=2, flip=0.5)


def each(function, count=60):
    return [function(draws_of(1, 2, i)) for i in range(count)]


def test_no_option_changes_and_draws_nothing():
    draws = draws_of(1, 2, 3)
    assert augmented(IMAGE, ImageConfig(), draws) is IMAGE
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
