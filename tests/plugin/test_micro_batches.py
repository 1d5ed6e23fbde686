"""With --moe-micro-batches, an update has the same batches on any number of ranks."""

import itertools
import logging
import random

import pytest
import torch
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from omegaconf import OmegaConf

from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator, set_update_freq

NUM_BATCHES = 23


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, prefetches):
        self.supports_prefetch = prefetches

    def __getitem__(self, index):
        return index

    def __len__(self):
        return NUM_BATCHES

    def prefetch(self, indices):
        pass


class _Ranks:
    def __init__(self, ranks, micro_batches, state=None, fix=False, **options):
        self.fix, self.iterators = fix, []
        for rank in range(ranks):
            made = {"batch_sampler": [[i] for i in range(NUM_BATCHES)], **options}
            dataset = _Numbers(prefetches=fix)
            iterator = ElasticEpochBatchIterator(dataset, _only, num_shards=ranks, shard_id=rank, **made)
            iterator.set_update_freq([1], micro_batches)
            if state is not None:
                iterator.load_state_dict(state)
            self.iterators.append(iterator)
        self.begin()

    def begin(self):
        rounds = self.iterators[0]._update_freq[0]
        epochs = [i.next_epoch_itr(shuffle=True, fix_batches_to_gpus=self.fix) for i in self.iterators]
        skips = self.iterators[0].skip_remainder_batch
        self.updates = zip(*(GroupedIterator(e, rounds, skips) for e in epochs), strict=True)

    def take(self, count=None):
        """Return the batches of the next `count` updates for every rank; None is an empty batch."""
        return list(itertools.islice(self.updates, count))

    def state(self):
        states = [iterator.state_dict() for iterator in self.iterators]
        assert all(state == states[0] for state in states)
        return states[0]


def _only(samples):
    return samples[0] if samples else None


def _real(update):
    """Return all batches of an update that are not empty, in global order."""
    by_rank = [[batch for batch in part if batch is not None] for part in update]
    in_order = itertools.chain.from_iterable(itertools.zip_longest(*by_rank))
    return [batch for batch in in_order if batch is not None]


ORDERS = {"shuffled": {}, "grouped": {"grouped_shuffling": True}, "fixed": {"fix": True}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [4, 6, 7, 8, 30])
def test_an_update_has_the_same_batches_on_any_number_of_ranks(size, order):
    options = ORDERS[order]
    expected = [_real(update) for update in _Ranks(1, size, **options).take()]
    seen = list(itertools.chain(*expected))
    # As in fairseq, grouped shuffling drops the last group of batches if the group is incomplete.
    assert (
        len(seen) == len(set(seen)) == (NUM_BATCHES // size * size if order == "grouped" else NUM_BATCHES)
    )
    if order == "shuffled":
        stock = EpochBatchIterator(_Numbers(False), _only, [[i] for i in range(NUM_BATCHES)])
        in_order = list(stock.next_epoch_itr(shuffle=True))
        assert expected == [in_order[k : k + size] for k in range(0, NUM_BATCHES, size)]
    for ranks in (2, 3, 4, size):
        found = _Ranks(ranks, size, **options).take()
        assert [_real(update) for update in found] == expected
        for part in itertools.chain(*found):
            assert len(part) <= -(-size // ranks)
            assert part[-1] is not None or all(batch is None for batch in part)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_may_resume_on_another_number_of_ranks_after_every_update(seed, order):
    draw, options = random.Random(seed), ORDERS[order]
    if order == "fixed":  # after a resume, fairseq ignores --fix-batches-to-gpus
        options = {}
    size = draw.choice([4, 6, 8])
    one = _Ranks(1, size, **options)
    expected = [_real(update) for update in one.take()]
    one.begin()
    expected += [_real(update) for update in one.take()]
    found, state = [], None
    while len(found) < len(expected):
        job = _Ranks(draw.randint(1, size), size, state, **options)
        for _ in range(draw.randint(1, 3)):
            update = job.take(1)
            if not update:
                job.begin()
                update = job.take(1)
            found += map(_real, update)
        state = job.state()
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(("before", "after"), [((2, 0), (3, 4)), ((4, 6), (3, 8)), ((3, 6), (4, 0))])
def test_a_run_resumed_with_another_number_of_micro_batches_starts_with_the_next_batch(before, after):
    """`before` and `after` are (ranks, micro-batches), and 0 micro-batches means --update-freq 1."""
    in_order = list(itertools.chain(*map(_real, _Ranks(*before).take())))
    job = _Ranks(*before)
    seen = list(itertools.chain(*map(_real, job.take(2))))
    later = _Ranks(*after, job.state())
    updates = [_real(update) for update in later.take()]
    seen += itertools.chain(*updates)
    assert seen == in_order
    assert {len(update) for update in updates[:-1]} == {after[1] or after[0]}
    assert later.state()["epoch"] == 2


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 8)), ((3, 4), (3, 9)), ((2, 0), (8, 0))])
def test_skip_remainder_batch_drops_a_partial_update_of_a_resumed_run(before, after, is_dynamic, caplog):
    """`before` and `after` are (ranks, micro-batches), and the resumed epoch has seven batches left."""
    caplog.set_level(logging.INFO)
    options = {"skip_remainder_batch": True}
    if is_dynamic:  # each epoch has different batches
        numbers = range(NUM_BATCHES)
        options["batch_sampler"] = lambda _, epoch: [[(i + epoch) % NUM_BATCHES] for i in numbers]
    job = _Ranks(*before, **options)
    job.take(16 // (before[1] or before[0]))
    later = _Ranks(*after, job.state(), **options)
    assert "rest of epoch 1 is less than an update, so --skip-remainder-batch skips it" in caplog.text
    assert later.iterators[0].epoch == 2
    assert later.take() == _Ranks(*after, epoch=2, **options).take() != []


def _root(count=8, freq=(1,), ranks=3):
    return OmegaConf.create(
        {
            "task": {"moe_micro_batches": count},
            "optimization": {"update_freq": list(freq)},
            "distributed_training": {"distributed_world_size": ranks},
        }
    )


def test_update_freq_is_computed_from_micro_batches_and_ranks():
    root = _root()
    for _ in range(2):  # the second call changes nothing
        set_update_freq(root, 3)
        assert list(root.optimization.update_freq) == [3]
    root = _root(count=0, freq=(2, 4))
    set_update_freq(root, 3)
    assert list(root.optimization.update_freq) == [2, 4]


def test_fewer_micro_batches_than_ranks_are_refused():
    with pytest.raises(
        ValueError, match=r"is 2, but this run has 3 ranks.* at least 3, or start at most 2"
    ):
        set_update_freq(_root(count=2), 3)
