"""Defines the task `image_classification`, which reads images and classes from folders or arrays."""

import logging
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from fairseq.tasks import FairseqTask, register_task

from fairseq_tutel.checkpoint.files import mapped
from fairseq_tutel.option import options_in, read, refuse_bad_values
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.registration.flags import made
from fairseq_tutel.plugin.run_state import is_training, root_of
from fairseq_tutel.plugin.training.resume import flag_and_path
from fairseq_tutel.plugin.training.task import InferenceMixin
from fairseq_tutel.tasks.image_dataset import ImageDataset
from fairseq_tutel.vision.images import different_class, open_images
from fairseq_tutel.vision.options import ImageConfig

logger = logging.getLogger(__name__)

ImageOptions = made("ImageOptions", options_in(ImageConfig))


@dataclass
class ImageClassificationConfig(ImageOptions):  # type: ignore[valid-type,misc]
    """Options of the task `image_classification`: the data folder, and options of images."""

    data: str = field(
        default="", metadata={"help": "folder with the splits train, valid, …: class folders or .npz files"}
    )


@register_task("image_classification", dataclass=ImageClassificationConfig)
class ImageClassificationTask(InferenceMixin, FairseqTask):
    """A task for image classification; checkpoints contain the training classes and the image shape."""

    def __init__(self, cfg: Any, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        self.image_config = read(ImageConfig, cfg)
        refuse_bad_values(self.image_config)
        self._opened = cache(open_images)
        self._augmented: ImageDataset | None = None  # The augmented training set.
        self.state.add_factory("images", self._read_training_set)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the data, ordered by class number."""
        return self.state.images["classes"]

    @property
    def num_classes(self) -> int:
        """The number of classes in the data."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """The number of channels of the model's input images."""
        return self.state.images["shape"][0]

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build an image model; in training, compare the checkpoint's classes with those of the data."""
        model = super().build_model(cfg, from_checkpoint)
        if is_training(self, cfg):
            self._compare_classes(model)
        return model

    def _compare_classes(self, model: Any) -> None:
        """Compare the classes of the data with those of the loaded checkpoint.

        If the classes differ, finetuning keeps the new head, and resuming raises an error.
        """
        flag, path = flag_and_path(root_of(self).checkpoint)
        other = different_class(_classes_in(path), self.class_names)
        if other is None:
            return
        number, before, now = other
        difference = f"class {number} of {path} is {before}, but in {self.cfg.data} it is {now}"
        if flag != "--finetune-from-model":
            raise ValueError(
                f"{difference}; give the data of the checkpoint's run, or --finetune-from-model to train a "
                "new head."
            )
        models = [module for module in model.modules() if hasattr(module, "keep_head")]
        for each in models:  # An ensemble has several members.
            each.keep_head()
        if models and world.is_first():
            logger.warning("%s, so the model gets a new head", difference)

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Open the images of one split; fairseq's trainer passes `combine` for the training set."""
        root = root_of(self)
        trains = root is not None and combine and split == root.dataset.train_subset
        images, shape = self._opened(self.cfg.data, split), tuple(self.state.images["shape"])
        dataset_of = partial(ImageDataset, images, self.class_names, shape, self.image_config)
        self.datasets[split] = dataset_of()
        if trains:
            self._augmented = dataset_of(root.common.seed)

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's batch iterator; images are augmented only in training."""
        # Validation may use the training set, too; only training passes update_epoch_batch_itr.
        if self._augmented is not None and "update_epoch_batch_itr" in kwargs:
            dataset = self._augmented
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the criterion, and raise an error if mixup is set but the criterion does not support it."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        if self.image_config.mixup and not getattr(criterion, "takes_mixed", False):
            raise ValueError(
                f"--image-mixup gives images two classes, but {type(criterion).__name__} uses only one "
                "class; give --criterion image_classification, or remove the option."
            )
        return criterion

    def _read_training_set(self) -> dict[str, Any]:
        """Return the training set's class names, and the image shape (from options or the first image)."""
        root, config = root_of(self), self.image_config
        images = self._opened(self.cfg.data, "train" if root is None else root.dataset.train_subset)
        channels = config.channels or images.channels(0)
        image = images.read(0, channels)
        shape = [channels, config.size or image.height, config.size or image.width]
        return {"classes": images.class_names, "shape": shape}


def _classes_in(path: str) -> list[str]:
    """Return the class names in a checkpoint, or [] if the checkpoint has none or cannot be read."""
    try:
        return mapped(path)["task_state"]["images"]["classes"]
    except Exception:  # fairseq will load the checkpoint later, and raise the error.
        return []
