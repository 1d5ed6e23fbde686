"""Defines a training batch iterator whose saved position does not depend on the number of ranks.

fairseq saves the number of batches that each rank consumed. ElasticEpochBatchIterator saves the number of
batches that all ranks consumed. A resumed run skips that many batches, and shards the rest.

If the ranks get unequal numbers of batches, some ranks end an update with an empty batch. On a rank with an
empty last batch, fairseq's trainer uses the gradients of the update's earlier batches, but does not count
their tokens. ElasticEpochBatchIterator therefore puts empty batches before a rank's last full batch.

With --moe-micro-batches N, update k has the global batches kN to kN + N - 1 on any number of ranks. The
order of batches is that of fairseq on N ranks. An update on W ranks takes ceil(N / W) rounds, and each rank
gets at most one batch per round.
"""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq.data.iterators import EpochBatchIterator, ShardedIterator

from fairseq_tutel.option import read
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


class _Resumed(NamedTuple):
    """A position in a resumed epoch that fairseq's iterator cannot represent on this number of ranks."""

    epoch: int
    consumed: int  # The number of batches that all ranks consumed before the resume.
    start: int  # The position that fairseq's iterator gets, in rounds of one batch per rank.
    order_shards: int  # The number of ranks for which fairseq makes the saved run's batch order.


class ElasticEpochBatchIterator(EpochBatchIterator):
    """An EpochBatchIterator that saves the number of batches that all ranks together have consumed."""

    _update_freq: Sequence[int] = (1,)
    _micro_batches = 0
    num_shards: int
    shard_id: int
    _next_epoch_itr: Any
    _resumed: _Resumed | None = None
    _start = 0

    def set_update_freq(self, update_freq: Sequence[int], micro_batches: int = 0) -> None:
        """Set a rank's micro-batches per update for each epoch (--update-freq).

        If `micro_batches` (all ranks' micro-batches per update) is given, each of W ranks has
        ceil(micro_batches / W) micro-batches per update in every epoch.
        """
        self._micro_batches = micro_batches
        self._update_freq = (rounds_of(micro_batches, self.num_shards),) if micro_batches else update_freq

    def start_in(self, epoch: int) -> None:
        """Start an epoch with the batches that were made for an earlier epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's iterator state, plus the number of batches that all ranks have consumed."""
        state = super().state_dict()
        done, resumed = state["iterations_in_epoch"], self._resumed
        state["order_shards"] = self._order_shards
        state["global_batches"] = self._batches_in(done)
        if done > 0 and resumed is not None and resumed.epoch == state["epoch"]:
            state["order_shards"] = resumed.order_shards
            state["global_batches"] = resumed.consumed + self._batches_in(done - resumed.start)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved position; recompute `iterations_in_epoch` for the current number of ranks."""
        saved_shards = state_dict.get("order_shards", self.num_shards)
        per_rank = state_dict.get("iterations_in_epoch", 0)
        consumed = state_dict.get("global_batches", per_rank * saved_shards)
        self._resumed = None
        # The start is a multiple of update_freq, because fairseq would otherwise drop the end of the epoch.
        update_freq = self._update_freq_in(state_dict["epoch"])
        start = math.ceil(consumed / self._batches_in(update_freq)) * update_freq
        same_position = consumed == self._batches_in(start)
        if consumed > 0 and not (same_position and saved_shards == self._order_shards):
            self._resumed = _Resumed(state_dict["epoch"], consumed, start, saved_shards)
        super().load_state_dict({**state_dict, "iterations_in_epoch": start})
        rest = self._next_epoch_itr
        if self.skip_remainder_batch and rest is not None and len(rest) - rest.n < update_freq:
            # fairseq's training loop fails in an epoch without an update, so such an epoch is skipped.
            self._skip_rest_of_epoch()

    def _skip_rest_of_epoch(self) -> None:
        logger.info(
            "the rest of epoch %d is less than an update, so --skip-remainder-batch skips it", self.epoch
        )
        self._next_epoch_itr = None
        if callable(self.batch_sampler):
            self._frozen_batches = None  # A callable makes new batches for each epoch.
        self.epoch += 1

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> Any:
        self._start = offset
        return super()._get_iterator_for_epoch(epoch, shuffle, fix_batches_to_gpus, offset)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        """Return this rank's batches of an epoch; an empty batch is moved before the last full batch."""
        if self._micro_batches:
            return self._in_updates(epoch, fix_batches_to_gpus, shuffle)
        batches = self._in_order(epoch, fix_batches_to_gpus, shuffle)
        update_freq = self._update_freq_in(epoch)
        in_last_update = (len(batches) - self._start - 1) % update_freq + 1
        if in_last_update > 1 and len(batches[-1]) == 0 and not self.skip_remainder_batch:
            batches[-2:] = batches[-1], batches[-2]
        return batches

    @property
    def _order_shards(self) -> int:
        """The number of ranks for which fairseq makes the batch order of this iterator."""
        return self._micro_batches or self.num_shards

    def _batches_in(self, rounds: int) -> int:
        """Return the number of batches that all ranks consume in `rounds` rounds of one batch per rank."""
        if self._micro_batches:
            return rounds // self._update_freq[0] * self._micro_batches
        return rounds * self.num_shards

    def _update_freq_in(self, epoch: int) -> int:
        return self._update_freq[min(epoch, len(self._update_freq)) - 1]

    def _in_order(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        resumed = self._resumed
        if resumed is None or resumed.epoch != epoch:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        in_order = self._global_order(epoch, fix_batches_to_gpus, shuffle, resumed.order_shards)
        rest = [batch for batch in in_order[resumed.consumed :] if len(batch) > 0]
        shard = ShardedIterator(rest, self.num_shards, self.shard_id, fill_value=[])
        # The sampler drops the placeholders [] of the first `start` batches, which were already consumed.
        return [[]] * resumed.start + list(shard)

    def _in_updates(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        """Return this rank's batches of an epoch with --moe-micro-batches; [] is an empty batch."""
        size, rounds, resumed = self._micro_batches, self._update_freq[0], self._resumed
        if resumed is None or resumed.epoch != epoch:
            resumed = _Resumed(epoch, 0, 0, size)
        in_order = self._global_order(epoch, fix_batches_to_gpus, shuffle, resumed.order_shards)
        batches: list[Any] = [[]] * resumed.start  # The sampler drops these placeholders.
        for first in range(resumed.consumed, len(in_order), size):
            update = in_order[first : first + size]
            if len(update) == size:
                batches += self._shard_of(update, rounds)
            elif not self.skip_remainder_batch:
                batches += self._shard_of(update, rounds_of(len(update), self.num_shards))
        # With --skip-remainder-batch, fairseq drops each rank's last batch, so an empty batch is appended.
        return [*batches, []] if self.skip_remainder_batch else batches

    def _shard_of(self, update: Sequence[Any], rounds: int) -> list[Any]:
        """Return this rank's batches of one update, with empty batches before the last full batch."""
        own = [batch for batch in update if len(batch) > 0][self.shard_id :: self.num_shards]
        own[-1:-1] = [[]] * (rounds - len(own))
        return own

    def _global_order(self, epoch: int, fix: bool, shuffle: bool, shards: int) -> list[Any]:
        """Return all ranks' batches of an epoch in the order in which `shards` ranks would consume them.

        If the batch order depends on the number of ranks, the shards of all ranks are interleaved.
        """
        if not (self.grouped_shuffling or (self._supports_prefetch and fix)):
            shards = 1
        own = self.num_shards, self.shard_id
        by_shard = []
        try:
            for self.shard_id in range(shards):
                self.num_shards = shards
                by_shard.append(super().ordered_batches(epoch, fix, shuffle))
        finally:
            self.num_shards, self.shard_id = own
        return list(itertools.chain.from_iterable(zip(*by_shard, strict=True)))


def rounds_of(micro_batches: int, ranks: int) -> int:
    """Return how many rounds of one micro-batch per rank are needed for `micro_batches` micro-batches."""
    return math.ceil(micro_batches / ranks)


def set_update_freq(root: Any, ranks: int) -> None:
    """Set --update-freq of a FairseqConfig to the number of rounds that --moe-micro-batches needs."""
    count = read(TaskConfig, root.task).moe_micro_batches
    if not count:
        return
    if count < ranks:
        raise ValueError(
            f"--moe-micro-batches is {count}, but this run has {ranks} ranks, and some of them would have "
            f"no micro-batch; give at least {ranks}, or start at most {count} ranks."
        )
    rounds = [rounds_of(count, ranks)]
    root.optimization.update_freq = rounds
    logger.info("--moe-micro-batches %d: set --update-freq %d on %d ranks", count, rounds[0], ranks)
