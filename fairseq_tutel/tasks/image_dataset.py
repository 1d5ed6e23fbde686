"""A fairseq data set of images: the order and the batches of each epoch.

B images of a batch, C channels, H and W of an image, N images of the set.
"""

import logging
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset

from fairseq_tutel.vision.augment import augmented, draw_mixing, draws_of, erased, mixed, order_of
from fairseq_tutel.vision.images import (
    Images,
    UnreadableImageError,
    fitted,
    labels_among,
    normalisation,
    refusal,
)
from fairseq_tutel.vision.options import ImageConfig

logger = logging.getLogger(__name__)


class ImageDataset(FairseqDataset):
    """Images of one split with their labels, decoded on access.

    In training an index includes the epoch: epoch * N + image. An item depends on its index alone, in any
    process, also after the next epoch has started. The seed is None in evaluation, which is not random.
    """

    def __init__(
        self,
        images: Images,
        classes: list[str],
        shape: tuple[int, int, int],  # (C, H, W) of the model's input
        config: ImageConfig,
        seed: int | None = None,
    ) -> None:
        self.images, self.config, self.shape, self.seed = images, config, shape, seed
        self.labels_N = labels_among(images, classes)
        if seed is not None and config.crop_padding >= min(shape[1:]):
            raise ValueError(
                f"--image-crop-padding is {config.crop_padding}, which crops images of "
                f"{shape[1]} x {shape[2]} pixels to padding alone; give at most {min(shape[1:]) - 1}."
            )
        self.mean, self.std = normalisation(config, shape[0])
        self._epoch = 0
        # Unreadable images, shared by all workers, so that each is logged once.
        self._left_out_N = torch.zeros(len(images), dtype=torch.bool).share_memory_()

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether all epochs have the same batches."""
        return self.seed is None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next order and augmentation."""
        self._epoch = 0 if self.seed is None else epoch

    def __len__(self) -> int:
        return len(self.images)

    def ordered_indices(self) -> np.ndarray:
        """Return the shuffled indices of the epoch; fairseq shuffles at most the batches.

        The order of a validation set is fixed, but shuffled, too: folders list images by class, and expert
        metrics, which are averages over batches, would describe batches of one class.
        """
        if self.seed is None:
            return order_of(0, 0, len(self))
        return self._epoch * len(self) + order_of(self.seed, self._epoch, len(self))

    def batch_by_size(
        self, indices: np.ndarray, max_tokens: Any = None, max_sentences: Any = None, **_: Any
    ) -> list[list[int]]:
        """Return batches of --batch-size images, or --max-tokens, without rounding to a multiple."""
        size = min((s for s in (max_tokens, max_sentences) if s is not None), default=1)
        if size < 1:
            raise ValueError(f"--batch-size or --max-tokens is {size}; give a number of at least 1.")
        return [indices[i : i + size].tolist() for i in range(0, len(indices), size)]

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list]:
        """Return all: images have no length."""
        return indices, []

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image with its label, or the reason why it is unreadable."""
        epoch, i = divmod(int(index), len(self))
        (channels, height, width), mixing = self.shape, None
        try:
            image = fitted(self.images.read(i, channels), height, width)
        except UnreadableImageError as error:
            return {"index": int(index), "unreadable": str(error)}
        if self.seed is None:
            image = (image - self.mean) / self.std
        else:
            draws = draws_of(self.seed, epoch, i)
            image = (augmented(image, self.config, draws) - self.mean) / self.std
            image = erased(image, self.config.erase, draws)
            mixing = draw_mixing(self.config, height, width, draws)
        return {"id": i, "image": image, "target": int(self.labels_N[i]), "mixing": mixing}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch: images [B, C, H, W] float32, normalized, their ids and target [B] int64.

        If images are mixed: target [B] of the second image, and share [B] of the first. Without samples the
        batch is empty, a dummy batch for fairseq. With an unreadable image it is {"refused": a sentence},
        unless such images are left out.
        """
        kept = [sample for sample in samples if "image" in sample]
        bad = [sample for sample in samples if "image" not in sample]
        if bad and self.config.errors == "refuse":
            return {"refused": refusal(bad[0]["unreadable"])}
        for sample in bad:
            self._leave_out(sample)
        if bad and not kept:  # it would have no loss; another image keeps the ranks in step
            kept = [self._next_readable(bad[-1]["index"])]
        if not kept:
            return {}
        images_BCHW = torch.stack([sample["image"] for sample in kept])
        batch: dict[str, Any] = {
            "net_input": {"images": images_BCHW},
            **{key: torch.tensor([sample[key] for sample in kept]) for key in ("id", "target")},
            **dict.fromkeys(("nsentences", "ntokens"), len(kept)),
        }
        if kept[0]["mixing"] is not None:
            mixings = [sample["mixing"] for sample in kept]
            batch["net_input"]["images"] = mixed(images_BCHW, mixings)
            share_B = torch.tensor([mixing.share for mixing in mixings])
            batch["mixed"] = {"target": batch["target"].roll(-1), "share": share_B}
        return batch

    def _leave_out(self, sample: dict[str, Any]) -> None:
        i = sample["index"] % len(self)
        if not self._left_out_N[i]:
            self._left_out_N[i] = True
            logger.warning("left out %s (%d so far)", sample["unreadable"], int(self._left_out_N.sum()))

    def _next_readable(self, index: int) -> dict[str, Any]:
        epoch, i = divmod(index, len(self))
        for step in range(1, len(self)):
            sample = self[epoch * len(self) + (i + step) % len(self)]
            if "image" in sample:
                return sample
        raise ValueError(f"{self.images.origin} has {len(self)} images, none of which can be read.")
