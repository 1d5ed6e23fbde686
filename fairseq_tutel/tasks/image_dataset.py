"""Defines a fairseq data set of images, which shuffles and batches the images in each epoch.

Shape suffixes are B (images in a batch), C (channels), H (height) and W (width). N is the number of images
in the set.
"""

from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset

from fairseq_tutel.vision.images import (
    Images,
    augmented,
    draws_of,
    fitted,
    labels_among,
    normalized,
    order_of,
    tensor_of,
)
from fairseq_tutel.vision.options import ImageConfig


class ImageDataset(FairseqDataset):
    """The images and labels of one split; an image is decoded when it is accessed.

    In training, an image's index in this data set includes the epoch: index = epoch * N + image. An item of
    the data set depends only on this index, so all processes get equal items, even after the next epoch has
    started. In evaluation, the seed is None, and no image is augmented at random.
    """

    def __init__(
        self,
        images: Images,
        classes: list[str],
        shape: tuple[int, int, int],  # The shape (C, H, W) of the model's input.
        config: ImageConfig,
        seed: int | None = None,
    ) -> None:
        self.images, self.config, self.shape, self.seed = images, config, shape, seed
        self.labels_N = labels_among(images, classes)
        self._epoch = 0

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether all epochs have the same batches, as in evaluation."""
        return self.seed is None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order and the augmentation of images."""
        self._epoch = 0 if self.seed is None else epoch

    def __len__(self) -> int:
        return len(self.images)

    def ordered_indices(self) -> np.ndarray:
        """Return the shuffled indices of an epoch, because fairseq itself would shuffle only batches.

        A validation set has a shuffled order that never changes. Folders list images by class. Without
        shuffling, each batch would have only one class, and averaged expert metrics would be wrong.
        """
        if self.seed is None:
            return order_of(0, 0, len(self))
        return self._epoch * len(self) + order_of(self.seed, self._epoch, len(self))

    def batch_by_size(
        self, indices: np.ndarray, max_tokens: Any = None, max_sentences: Any = None, **_: Any
    ) -> list[list[int]]:
        """Split the indices into batches of at most --batch-size and at most --max-tokens images."""
        size = min((s for s in (max_tokens, max_sentences) if s is not None), default=1)
        return [indices[i : i + size].tolist() for i in range(0, len(indices), size)]

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list]:
        """Return all indices, because fairseq's filter by length does not apply to images."""
        return indices, []

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image with its label; raise ValueError if the image is unreadable."""
        epoch, i = divmod(int(index), len(self))
        channels, height, width = self.shape
        image, share = fitted(self.images.read(i, channels), height, width), 1.0
        if self.seed is not None:
            draws = draws_of(self.seed, epoch, i)
            image = augmented(image, self.config, draws)
            share = draws.beta(self.config.mixup, self.config.mixup) if self.config.mixup else 1.0
        x = normalized(tensor_of(image))
        return {"id": i, "image": x, "target": int(self.labels_N[i]), "share": float(share)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch of normalized images [B, C, H, W] float32, ids, and targets [B] int64.

        With mixup, each image is blended with the next image of the batch, and the last with the first.
        A mixed batch has the key "mixed" with the target [B] of each image's next image, and the share [B]
        of the image itself. Without samples, the batch is empty, and fairseq treats it as a dummy batch.

        Mixup is from Zhang et al. 2018, equation 1, with one share for each image.
        """
        if not samples:
            return {}
        images_BCHW = torch.stack([sample["image"] for sample in samples])
        batch: dict[str, Any] = {
            "net_input": {"images": images_BCHW},
            **{key: torch.tensor([sample[key] for sample in samples]) for key in ("id", "target")},
            **dict.fromkeys(("nsentences", "ntokens"), len(samples)),
        }
        if self.seed is not None and self.config.mixup:
            share_B = torch.tensor([sample["share"] for sample in samples])
            next_B111 = torch.tensor([1 - sample["share"] for sample in samples]).view(-1, 1, 1, 1)
            batch["net_input"]["images"] = images_BCHW.lerp(images_BCHW.roll(-1, 0), next_B111)
            batch["mixed"] = {"target": batch["target"].roll(-1), "share": share_B}
        return batch
