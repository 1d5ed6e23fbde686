"""ElasticEpochBatchIterator gives an epoch the same batches on any number of ranks."""

import itertools

import pytest
import torch
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator

from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator

NUM_BATCHES = 23


class _Numbers(torch.utils.data.Dataset):
    supports_prefetch = False

    def __getitem__(self, index):
        return index

    def __len__(self):
        return NUM_BATCHES


def _iterators(kind, ranks, **options):
    def collate(samples):
        return samples[0] if samples else None

    return [
        kind(
            _Numbers(), collate, [[i] for i in range(NUM_BATCHES)], num_shards=ranks, shard_id=r, **options
        )
        for r in range(ranks)
    ]


def _take(iterators, steps):
    """Consume `steps` batches on every rank; return all batches that are not empty, in global order."""
    rows = zip(*[[next(i._cur_epoch_itr) for _ in range(steps)] for i in iterators], strict=True)
    return [batch for row in rows for batch in row if batch is not None]


def _begin(iterators):
    for iterator in iterators:
        iterator.next_epoch_itr(shuffle=True)


def _rest(iterators):
    return _take(iterators, len(iterators[0]._cur_epoch_itr) - iterators[0]._cur_epoch_itr.n)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("legs", [[(2, 3), (1, 4), (4, 2), (3, None)], [(4, 3), (2, 1), (4, None)]])
def test_a_run_resumed_on_another_number_of_ranks_reads_every_batch_once(legs, grouped):
    options = {"grouped_shuffling": grouped}
    straight = _iterators(EpochBatchIterator, legs[0][0], **options)
    _begin(straight)
    expected = _rest(straight)
    seen, state = [], None
    for ranks, steps in legs:
        iterators = _iterators(ElasticEpochBatchIterator, ranks, **options)
        for iterator in iterators:
            if state is not None:
                iterator.load_state_dict(state)
        _begin(iterators)
        seen += _rest(iterators) if steps is None else _take(iterators, steps)
        states = [iterator.state_dict() for iterator in iterators]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert seen == expected
    # As in fairseq, grouped shuffling drops the last group of batches if the group is incomplete.
    assert grouped or sorted(seen) == list(range(NUM_BATCHES))
    assert state["iterations_in_epoch"] == 0
    assert state["epoch"] == 2


def test_the_epoch_after_a_resumed_epoch_has_fairseq_s_batches():
    iterators = _iterators(ElasticEpochBatchIterator, 2)
    _begin(iterators)
    _take(iterators, 3)
    state = iterators[0].state_dict()
    resumed = _iterators(ElasticEpochBatchIterator, 4)
    for iterator in resumed:
        iterator.load_state_dict(state)
    _begin(resumed)
    _rest(resumed)
    _begin(resumed)
    stock = _iterators(EpochBatchIterator, 4, epoch=2)
    _begin(stock)
    assert _rest(resumed) == _rest(stock)


def _updates(ranks, update_freq, kind=ElasticEpochBatchIterator, consumed=0, **options):
    """Return the batches of each update of epoch 2 for every rank; None is an empty batch."""
    iterators = _iterators(kind, ranks, epoch=2, **options)
    for iterator in iterators:
        if kind is ElasticEpochBatchIterator:
            iterator.set_update_freq((1, update_freq))
        state = {"epoch": 2, "iterations_in_epoch": consumed, "order_shards": 1}
        iterator.load_state_dict(state)
    epochs = [GroupedIterator(i.next_epoch_itr(shuffle=True), update_freq) for i in iterators]
    return list(zip(*epochs, strict=True))


@pytest.mark.parametrize(
    ("ranks", "update_freq", "updates_done"),
    [(2, 3, 0), (2, 3, 1), (3, 4, 0), (3, 4, 1), (4, 5, 0), (4, 5, 1), (2, 1, 5), (24, 1, 0), (5, 5, 0)],
)
def test_every_update_has_the_same_batches_on_any_number_of_ranks(ranks, update_freq, updates_done):
    consumed = updates_done * ranks * update_freq
    found = _updates(ranks, update_freq, consumed=consumed)
    expected = _updates(1, ranks * update_freq, consumed=consumed)
    assert [sorted(b for part in u for b in part if b is not None) for u in found] == [
        sorted(batches) for (batches,) in expected
    ]
    for part in itertools.chain(*found):
        assert part[-1] is not None or all(batch is None for batch in part)


@pytest.mark.parametrize(("ranks", "update_freq"), [(1, 3), (2, 2), (3, 5)])
def test_a_resume_with_a_larger_update_freq_trains_all_remaining_batches(ranks, update_freq):
    found = _updates(ranks, update_freq, consumed=4)
    rest = [batch for part in itertools.chain(*found) for batch in part if batch is not None]
    expected = _updates(1, NUM_BATCHES)[0][0][4:]
    assert sorted(rest) == sorted(expected)
    assert len(found) == -(-len(expected) // (ranks * update_freq))
