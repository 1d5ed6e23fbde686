"""What fairseq's iterators make of images: the same batches whatever workers, ranks and resumes."""

import logging
import multiprocessing

import numpy as np
import pytest
import torch
from fairseq.tasks import FairseqTask, setup_task
from omegaconf import OmegaConf

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator
from fairseq_tutel.tasks import image_dataset
from fairseq_tutel.tasks.image_dataset import ImageDataset
from fairseq_tutel.vision.images import UnreadableImageError, open_images
from fairseq_tutel.vision.options import ImageConfig

register()

N, BATCH = 22, 4
AUGMENTED = {"crop_padding": 1, "flip": 0.5, "jitter": 0.2, "erase": 0.5, "mixup": 0.3, "cutmix": 1.0}


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
    """Return all of a batch as text, to compare."""
    tensors = [batch["id"], batch["net_input"]["images"], batch["target"], *batch.get("mixed", {}).values()]
    return [tensor.numpy().tobytes() for tensor in tensors]


def epoch_of(images, epoch, **options):
    return [flat(batch) for batch in iterator_of(dataset_of(images, **options), epoch).next_epoch_itr()]


@pytest.fixture(autouse=True)
def no_readers_are_left():
    """Workers of an iterator that is garbage end after 5 seconds each, in another test."""
    before = set(multiprocessing.active_children())  # of tests of other files
    yield
    for worker in set(multiprocessing.active_children()) - before:
        worker.terminate()
        worker.join()


def test_an_epoch_is_a_shuffle_of_the_images_in_full_batches(images):
    dataset = dataset_of(images)
    orders = []
    for epoch in (1, 2):
        batches = list(iterator_of(dataset, epoch).next_epoch_itr())
        assert sorted(len(batch["id"]) for batch in batches) == [2, 4, 4, 4, 4, 4]
        assert all(batch["nsentences"] == batch["ntokens"] == len(batch["id"]) for batch in batches)
        assert all(batch["target"].equal(batch["id"] % 3) for batch in batches)
        orders.append(torch.cat([batch["id"] for batch in batches]).tolist())
        assert sorted(orders[-1]) == list(range(N)) != orders[-1]
    # Other images meet in another epoch: stock would shuffle batches alone.
    assert {frozenset(orders[0][i : i + 4]) for i in range(0, N, 4)}.isdisjoint(
        {frozenset(orders[1][i : i + 4]) for i in range(0, N, 4)}
    )


def test_validation_has_one_order_in_which_every_batch_is_of_several_classes(images):
    images.labels_N = np.sort(images.labels_N)  # as folders of classes list them
    orders = []
    for epoch in (1, 2):
        iterator = iterator_of(dataset_of(images, None, **AUGMENTED), epoch)
        batches = list(iterator.next_epoch_itr(shuffle=False))
        orders.append(torch.cat([batch["id"] for batch in batches]).tolist())
        assert all(len(batch["target"].unique()) > 1 for batch in batches)
        assert "mixed" not in batches[0]
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(N))


@pytest.mark.parametrize("saved, resumed, workers", [(1, 2, 0), (2, 1, 1), (1, 1, 2), (2, 3, 0)])
def test_a_resume_in_the_middle_goes_on_with_the_same_batches(images, saved, resumed, workers):
    expected = epoch_of(images, 2, **AUGMENTED)
    assert expected != epoch_of(images, 3, **AUGMENTED)
    dataset = dataset_of(images, **AUGMENTED)
    first = [iterator_of(dataset, 2, saved, rank) for rank in range(saved)]
    steps = 2 // saved
    own = [iterator.next_epoch_itr() for iterator in first]
    before = [next(batches) for _ in range(steps) for batches in own]
    state = first[0].state_dict()
    # Another process, whose set of images begins anew.
    rest = []
    for rank in range(resumed):
        again = iterator_of(dataset_of(images, **AUGMENTED), state["epoch"], resumed, rank, workers)
        again.load_state_dict(state)
        rest.append(list(again.next_epoch_itr()))
    after = [batch for row in zip(*rest, strict=True) for batch in row if batch]
    assert [flat(batch) for batch in before + after] == expected


def test_mixed_targets_are_those_of_the_next_image(images):
    batch = next(iterator_of(dataset_of(images, mixup=0.5)).next_epoch_itr())
    alone = next(iterator_of(dataset_of(images)).next_epoch_itr())
    share = batch["mixed"]["share"][:, None, None, None]
    plain = alone["net_input"]["images"]
    expected = share * plain + (1 - share) * plain.roll(-1, 0)
    assert torch.allclose(batch["net_input"]["images"], expected, atol=1e-6)
    assert torch.equal(batch["mixed"]["target"], alone["target"].roll(-1))


def break_images(images, monkeypatch, broken):
    read = images.read

    def torn(i, channels):
        if i in broken:
            raise UnreadableImageError(f"{images.name(i)}: torn")
        return read(i, channels)

    monkeypatch.setattr(images, "read", torn)


@pytest.fixture
def unshuffled(monkeypatch):
    monkeypatch.setattr(image_dataset, "order_of", lambda seed, epoch, count: np.arange(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named_once_and_left_out_of_its_batch(
    images, unshuffled, monkeypatch, caplog, workers
):
    broken = {1, 9, 12, 13, 14, 15}
    break_images(images, monkeypatch, broken)
    dataset = dataset_of(images, None, errors="skip")
    iterator = iterator_of(dataset, workers=workers)
    with caplog.at_level(logging.WARNING, "fairseq_tutel"):
        for _ in range(2):
            batches = [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=False)]
    # Of the fourth batch nothing can be read: the next image that can stands in for it.
    assert batches == [[0, 2, 3], [4, 5, 6, 7], [8, 10, 11], [16], [16, 17, 18, 19], [20, 21]]
    assert int(dataset._left_out_N.sum()) == 6
    if not workers:  # theirs go to their own logs
        assert [m.rpartition("[")[2] for m in caplog.messages] == [
            f"{i}]: torn ({n} so far)" for n, i in enumerate(sorted(broken), 1)
        ]


def test_an_unreadable_image_is_refused_in_a_sentence(images, unshuffled, monkeypatch):
    break_images(images, monkeypatch, {1})
    batch = next(iterator_of(dataset_of(images, None), workers=1).next_epoch_itr(shuffle=False))
    assert batch == {
        "refused": f"{images.origin}[1]: torn; repair or remove the image, or add --image-errors skip."
    }
    break_images(images, monkeypatch, set(range(N)))
    with pytest.raises(ValueError, match=r"has 22 images, but none can be read; check them\.$"):
        next(iterator_of(dataset_of(images, None, errors="skip")).next_epoch_itr())


def test_a_criterion_of_one_class_gets_no_mixed_images():
    options = {"_name": "image_classification", "image_cutmix": 1.0}
    task = setup_task(OmegaConf.create(options))
    task.build_criterion(OmegaConf.create({"_name": "image_classification"}))
    with pytest.raises(ValueError, match="but CMCLCriterion uses only one class; give"):
        task.build_criterion(OmegaConf.create({"_name": "cmcl"}))


def test_sizes_that_leave_nothing_are_refused(images):
    with pytest.raises(ValueError, match=r"--image-crop-padding is 5, .* give at most 4"):
        dataset_of(images, crop_padding=5)
    with pytest.raises(ValueError, match="--batch-size or --max-tokens is -3; give"):
        dataset_of(images).batch_by_size(np.arange(N), max_sentences=-3)


@pytest.mark.parametrize("name", ["image_classification", "moe_image_classification"])
def test_an_epoch_s_workers_end_when_the_next_begins(name, images, tmp_path):
    task = setup_task(OmegaConf.create({"_name": name, "data": str(tmp_path)}))
    dataset, before = dataset_of(images), set(multiprocessing.active_children())
    for epoch in (1, 2, 3):
        dataset.set_epoch(epoch)
        iterator = task.get_batch_iterator(dataset, max_sentences=BATCH, epoch=epoch, num_workers=2)
        assert sum(len(batch["id"]) for batch in iterator.next_epoch_itr()) == N
        assert len(set(multiprocessing.active_children()) - before) == 2
