"""Resume in the middle of an epoch on another number of ranks, without repeating or skipping a batch.

Stock saves how many batches each rank consumed, which means another place in the epoch for another
number of ranks. Here the number of global batches is saved and that many are dropped before
sharding.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from fairseq.data.iterators import EpochBatchIterator, ShardedIterator


@dataclass(frozen=True)
class _Resumed:
    """The epoch that was resumed on a place that per-rank offsets cannot express."""

    epoch: int
    consumed: int
    start: int
    order_shards: int


class ElasticEpochBatchIterator(EpochBatchIterator):
    """EpochBatchIterator whose state says how many global batches were consumed."""

    _resumed: _Resumed | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the stock state with the global place in the epoch."""
        state = super().state_dict()
        done, resumed = state["iterations_in_epoch"], self._resumed
        state["order_shards"] = self.num_shards
        state["global_batches"] = done * self.num_shards
        if done > 0 and resumed is not None and resumed.epoch == state["epoch"]:
            state["order_shards"] = resumed.order_shards
            state["global_batches"] = resumed.consumed + (done - resumed.start) * self.num_shards
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved place; `iterations_in_epoch` is rewritten for this number of ranks."""
        saved_shards = state_dict.get("order_shards", self.num_shards)
        per_rank = state_dict.get("iterations_in_epoch", 0)
        consumed = state_dict.get("global_batches", per_rank * saved_shards)
        self._resumed = None
        start = math.ceil(consumed / self.num_shards)
        same_place = consumed == start * self.num_shards
        if consumed > 0 and not (same_place and saved_shards == self.num_shards):
            self._resumed = _Resumed(state_dict["epoch"], consumed, start, saved_shards)
        super().load_state_dict({**state_dict, "iterations_in_epoch": start})

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        """Return this rank's batches of the epoch, in order."""
        resumed = self._resumed
        if resumed is None or resumed.epoch != epoch:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        in_order = self._global_order(epoch, fix_batches_to_gpus, shuffle, resumed.order_shards)
        rest = [batch for batch in in_order[resumed.consumed :] if len(batch) > 0]
        shard = ShardedIterator(rest, self.num_shards, self.shard_id, fill_value=[])
        # The sampler cuts `start` batches off the front: what was consumed before.
        return [[]] * resumed.start + list(shard)

    def _global_order(self, epoch: int, fix: bool, shuffle: bool, shards: int) -> list[Any]:
        """Return the batches as the ranks of the saved run took them, one from each in turn.

        The order can depend on their number (grouped shuffling, batches fixed to GPUs), so every
        shard is asked for.
        """
        own = self.num_shards, self.shard_id
        by_shard = []
        try:
            for self.shard_id in range(shards):
                self.num_shards = shards
                by_shard.append(super().ordered_batches(epoch, fix, shuffle))
        finally:
            self.num_shards, self.shard_id = own
        return list(itertools.chain.from_iterable(zip(*by_shard, strict=True)))
