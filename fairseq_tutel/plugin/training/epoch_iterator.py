"""The batch iterator of training, whose position does not depend on the number of ranks.

fairseq saves how many batches each rank consumed. Here the number of global batches is saved, and that many
are dropped before sharding. Where ranks cannot share batches evenly, an empty batch fills the last update
of some, and fairseq's trainer counts nothing of a rank's update whose last batch is empty, although it adds
up its gradients. Here the empty batch precedes the last one.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq.data.iterators import EpochBatchIterator, ShardedIterator


class _Resumed(NamedTuple):
    """An epoch that was resumed at a position that per-rank offsets cannot express."""

    epoch: int
    consumed: int
    start: int
    order_shards: int


class ElasticEpochBatchIterator(EpochBatchIterator):
    """EpochBatchIterator whose state has the number of global batches that were consumed."""

    _update_freq: Sequence[int] = (1,)
    num_shards: int
    shard_id: int
    _resumed: _Resumed | None = None
    _start = 0

    def set_update_freq(self, update_freq: Sequence[int]) -> None:
        """Set --update-freq: micro-batches per update in each epoch, the last for all later ones."""
        self._update_freq = update_freq

    def state_dict(self) -> dict[str, Any]:
        """Return the stock state with the global position in the epoch."""
        state = super().state_dict()
        done, resumed = state["iterations_in_epoch"], self._resumed
        state["order_shards"] = self.num_shards
        state["global_batches"] = done * self.num_shards
        if done > 0 and resumed is not None and resumed.epoch == state["epoch"]:
            state["order_shards"] = resumed.order_shards
            state["global_batches"] = resumed.consumed + (done - resumed.start) * self.num_shards
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position; `iterations_in_epoch` is recomputed for this number of ranks."""
        saved_shards = state_dict.get("order_shards", self.num_shards)
        per_rank = state_dict.get("iterations_in_epoch", 0)
        consumed = state_dict.get("global_batches", per_rank * saved_shards)
        self._resumed = None
        # fairseq loses the end of an epoch that starts in the middle of an update.
        update_freq = self._update_freq_in(state_dict["epoch"])
        start = math.ceil(consumed / (self.num_shards * update_freq)) * update_freq
        same_position = consumed == start * self.num_shards
        if consumed > 0 and not (same_position and saved_shards == self.num_shards):
            self._resumed = _Resumed(state_dict["epoch"], consumed, start, saved_shards)
        super().load_state_dict({**state_dict, "iterations_in_epoch": start})

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> Any:
        self._start = offset
        return super()._get_iterator_for_epoch(epoch, shuffle, fix_batches_to_gpus, offset)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        """Return this rank's batches of the epoch, in order; an empty one does not end an update."""
        batches = self._in_order(epoch, fix_batches_to_gpus, shuffle)
        update_freq = self._update_freq_in(epoch)
        in_last_update = (len(batches) - self._start - 1) % update_freq + 1
        if in_last_update > 1 and len(batches[-1]) == 0 and not self.skip_remainder_batch:
            batches[-2:] = batches[-1], batches[-2]
        return batches

    def _update_freq_in(self, epoch: int) -> int:
        return self._update_freq[min(epoch, len(self._update_freq)) - 1]

    def _in_order(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        resumed = self._resumed
        if resumed is None or resumed.epoch != epoch:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        in_order = self._global_order(epoch, fix_batches_to_gpus, shuffle, resumed.order_shards)
        rest = [batch for batch in in_order[resumed.consumed :] if len(batch) > 0]
        shard = ShardedIterator(rest, self.num_shards, self.shard_id, fill_value=[])
        # The sampler drops the first `start` batches, which were consumed before.
        return [[]] * resumed.start + list(shard)

    def _global_order(self, epoch: int, fix: bool, shuffle: bool, shards: int) -> list[Any]:
        """Return the batches in the order of the saved run: one from each rank in turn.

        If the order depends on the number of ranks, it is joined from every shard.
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
