"""fairseq's iterators of images make the same batches for any number of workers, ranks and resumes."""

import multiprocessing

import numpy as np
import pytest
import torch
from fairseq.tasks import FairseqTask, setup_task
from omegaconf import OmegaConf

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator
from fairseq_tutel.tasks.image_dataset import ImageDataset
from fairseq_tutel.vision.images import open_images
from fairseq_tutel.vision.options import ImageConfig

register()

N, BATCH = 22, 4
AUGMENTED = {"crop_padding": 1, "flip": 0.5, "mixup": 0.3}


@pytest.fixture
def images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (N, 5, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", images=pixels, labels=np.arange(N) % 3)
    return open_images(str(tmp_path), "train")


def dataset_of(images, seed=7, **options):
    return ImageDataset(images, ["0", "1", "2"], (3, 5, 6), ImageConfig(**options), seed)


def iterator_of(dataset, epoch=1, ranks=1, rank=0, workers=0):
    task = FairseqTask(None)
    iterator = task.get_batch_iterator(
        dataset, max_sentences=BATCH, required_batch_size_multiple=8, seed=7, epoch=epoch,
        num_shards=ranks, shard_id=rank, num_workers=workers,
    )  # fmt: skip
    iterator.__class__ = ElasticEpochBatchIterator
    return iterator


def flat(batch):
    """Return all tensors of a batch as bytes, for comparison."""
    tensors = [batch["id"], batch["net_input"]["images"], batch["target"], *batch.get("mixed", {}).values()]
    return [tensor.numpy().tobytes() for tensor in tensors]


def epoch_of(images, epoch, **options):
    return [flat(batch) for batch in iterator_of(dataset_of(images, **options), epoch).next_epoch_itr()]


@pytest.fixture(autouse=True)
def no_readers_are_left():
    """End the workers of iterators; otherwise a later test would wait 5 s for each of them."""
    before = set(multiprocessing.active_children())  # these belong to tests of other files
    yield
    for worker in set(multiprocessing.active_children()) - before:
        worker.terminate()
        worker.join()


def test_an_epoch_has_all_images_shuffled_in_full_batches(images):
    dataset = dataset_of(images)
    orders = []
    for epoch in (1, 2):
        batches = list(iterator_of(dataset, epoch).next_epoch_itr())
        assert sorted(len(batch["id"]) for batch in batches) == [2, 4, 4, 4, 4, 4]
        assert all(batch["nsentences"] == batch["ntokens"] == len(batch["id"]) for batch in batches)
        assert all(batch["target"].equal(batch["id"] % 3) for batch in batches)
        orders.append(torch.cat([batch["id"] for batch in batches]).tolist())
        assert sorted(orders[-1]) == list(range(N)) != orders[-1]
    # Batches differ between epochs, while fairseq itself shuffles only complete batches.
    assert {frozenset(orders[0][i : i + 4]) for i in range(0, N, 4)}.isdisjoint(
        {frozenset(orders[1][i : i + 4]) for i in range(0, N, 4)}
    )


def test_validation_has_one_shuffled_order_for_all_epochs(images):
    images.labels_N = np.sort(images.labels_N)  # sorted by class, like the images of folders
    orders = []
    for epoch in (1, 2):
        iterator = iterator_of(dataset_of(images, None, **AUGMENTED), epoch)
        batches = list(iterator.next_epoch_itr(shuffle=False))
        orders.append(torch.cat([batch["id"] for batch in batches]).tolist())
        assert all(len(batch["target"].unique()) > 1 for batch in batches)
        assert "mixed" not in batches[0]
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(N))


@pytest.mark.parametrize("saved, resumed, workers", [(1, 2, 0), (2, 1, 1), (2, 3, 0)])
def test_a_resume_within_an_epoch_continues_with_the_same_batches(images, saved, resumed, workers):
    expected = epoch_of(images, 2, **AUGMENTED)
    assert expected != epoch_of(images, 3, **AUGMENTED)
    dataset = dataset_of(images, **AUGMENTED)
    first = [iterator_of(dataset, 2, saved, rank) for rank in range(saved)]
    steps = 2 // saved
    own = [iterator.next_epoch_itr() for iterator in first]
    before = [next(batches) for _ in range(steps) for batches in own]
    state = first[0].state_dict()
    rest = []
    for rank in range(resumed):
        again = iterator_of(dataset_of(images, **AUGMENTED), state["epoch"], resumed, rank, workers)
        again.load_state_dict(state)
        rest.append(list(again.next_epoch_itr()))
    after = [batch for row in zip(*rest, strict=True) for batch in row if batch]
    assert [flat(batch) for batch in before + after] == expected


def test_each_image_is_mixed_with_the_next_image_and_its_target(images):
    batch = next(iterator_of(dataset_of(images, mixup=0.5)).next_epoch_itr())
    alone = next(iterator_of(dataset_of(images)).next_epoch_itr())
    share = batch["mixed"]["share"][:, None, None, None]
    plain = alone["net_input"]["images"]
    expected = share * plain + (1 - share) * plain.roll(-1, 0)
    assert torch.allclose(batch["net_input"]["images"], expected, atol=1e-6)
    assert torch.equal(batch["mixed"]["target"], alone["target"].roll(-1))


def test_a_criterion_that_does_not_support_mixed_images_is_refused():
    options = {"_name": "image_classification", "image_mixup": 1.0}
    task = setup_task(OmegaConf.create(options))
    task.build_criterion(OmegaConf.create({"_name": "image_classification"}))
    with pytest.raises(ValueError, match="but CMCLCriterion uses only one class; give"):
        task.build_criterion(OmegaConf.create({"_name": "cmcl"}))
