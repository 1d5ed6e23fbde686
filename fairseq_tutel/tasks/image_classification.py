"""The task image_classification: images of folders or arrays, and the class of each."""

import logging
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    MODEL_REGISTRY,
    FairseqEncoderDecoderModel,
    FairseqLanguageModel,
)
from fairseq.tasks import FairseqTask, register_task

from fairseq_tutel.checkpoint.files import mapped
from fairseq_tutel.options.option import options_in, read, refuse_bad_values
from fairseq_tutel.plugin.registration.flags import made
from fairseq_tutel.plugin.run_state import is_training, root_of
from fairseq_tutel.plugin.training.resume import flag_and_path
from fairseq_tutel.plugin.training.task import InferenceMixin
from fairseq_tutel.ranks import world
from fairseq_tutel.tasks.image_dataset import ImageDataset
from fairseq_tutel.vision.images import (
    UnreadableImageError,
    classes_of,
    different_class,
    open_images,
    refusal,
)
from fairseq_tutel.vision.options import ImageConfig

logger = logging.getLogger(__name__)

ImageOptions = made("ImageOptions", options_in(ImageConfig))


@dataclass
class ImageClassificationConfig(ImageOptions):  # type: ignore[valid-type,misc]
    """The folder of the data, then the options of images."""

    data: str = field(
        default="", metadata={"help": "folder with train, valid, …: folders of classes, or .npz files"}
    )


@register_task("image_classification", dataclass=ImageClassificationConfig)
class ImageClassificationTask(InferenceMixin, FairseqTask):
    """Reads classes and the shape of images from the training set, and saves them in checkpoints."""

    def __init__(self, cfg: Any, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        self.image_config = read(ImageConfig, cfg)
        refuse_bad_values(self.image_config)
        self._opened = cache(open_images)
        self._augmented: ImageDataset | None = None  # the training set
        self.state.add_factory("images", self._read_training_set)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in the order of their numbers."""
        return self.state.images["classes"]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """Channels of the model's input."""
        return self.state.images["shape"][0]

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build a model of images; refuse models of words, which need a dictionary."""
        name = getattr(cfg, "ensemble_arch", "") or cfg._name
        kind = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name, object))
        if issubclass(kind, FairseqLanguageModel | FairseqEncoderDecoderModel):
            raise ValueError(
                f"--arch {name} reads words, and --task {self.cfg._name} has images; choose an --arch "
                "such as swin_v2_moe_tiny."
            )
        model = super().build_model(cfg, from_checkpoint)
        if is_training(self, cfg):
            self._compare_classes(model)
        return model

    def _compare_classes(self, model: Any) -> None:
        """Keep a new head in finetuning on other classes; refuse to resume with them."""
        flag, path = flag_and_path(root_of(self).checkpoint)
        other = different_class(_classes_in(path), self.class_names)
        if other is None:
            return
        number, before, now = other
        difference = f"class {number} of {path} is {before}, and of {self.cfg.data} it is {now}"
        if flag != "--finetune-from-model":
            raise ValueError(
                f"{difference}; give the data of that run, or --finetune-from-model for a new head."
            )
        models = [module for module in model.modules() if hasattr(module, "keep_head")]
        for each in models:  # of an ensemble, its members
            each.keep_head()
        if models and world.is_first():
            logger.warning("%s: the head is initialized", difference)

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Open a split; the Trainer sets `combine` for the training set."""
        root = root_of(self)
        trains = root is not None and combine and split == root.dataset.train_subset
        images, shape = self._opened(self.cfg.data, split), tuple(self.state.images["shape"])
        dataset_of = partial(ImageDataset, images, self.class_names, shape, self.image_config)
        self.datasets[split] = dataset_of()
        if trains:
            self._augmented = dataset_of(root.common.seed)

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the stock iterator, with augmentation for training only."""
        # The training set may also be validated under the same name; only training passes this argument.
        if self._augmented is not None and "update_epoch_batch_itr" in kwargs:
            dataset = self._augmented
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the criterion; refuse mixed images for one that uses a single class per image."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        if self.image_config.mixes and not getattr(criterion, "takes_mixed", False):
            raise ValueError(
                "--image-mixup and --image-cutmix give images two classes, and "
                f"{type(criterion).__name__} uses one of them; choose --criterion image_classification, "
                "or drop them."
            )
        return criterion

    def train_step(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step; an unreadable image ends the run."""
        _refuse_unreadable(sample)
        return super().train_step(sample, *args, **kwargs)

    def valid_step(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step; an unreadable image ends the run."""
        _refuse_unreadable(sample)
        return super().valid_step(sample, *args, **kwargs)

    def _read_training_set(self) -> dict[str, Any]:
        """Return the classes and the image shape, from the options and the first readable image."""
        root, config = root_of(self), self.image_config
        images = self._opened(self.cfg.data, "train" if root is None else root.dataset.train_subset)
        for i in range(len(images)):
            try:
                channels = config.channels or images.channels(i)
                height, width = images.read(i, channels).shape[1:]
            except UnreadableImageError as error:
                if config.errors == "refuse":
                    raise ValueError(refusal(str(error))) from None
                continue
            shape = [channels, config.size or height, config.size or width]
            return {"classes": classes_of(images), "shape": shape}
        raise ValueError(f"{images.origin} has {len(images)} images, none of which can be read.")


def _classes_in(path: str) -> list[str]:
    """Return the names of a checkpoint's classes; none if it has none, or cannot be read."""
    try:
        return mapped(path)["task_state"]["images"]["classes"]
    except Exception:  # many kinds; loading it will report the error
        return []


def _refuse_unreadable(sample: Any) -> None:
    # Raised here, since a worker's error would include the worker's traceback.
    if "refused" in sample:
        raise ValueError(sample["refused"])
