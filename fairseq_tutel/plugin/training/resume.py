"""How a training goes on: from which checkpoint, with which options, and where in the epoch.

Stock saves how many batches each rank consumed, which means another place in the epoch for another
number of ranks. Here the number of global batches is saved and that many are dropped before
sharding.

Where ranks cannot share batches evenly, an empty one fills up the last update of some. Stock's trainer
counts nothing of such a rank's update if the empty one is its last, though its gradients are added up;
here it comes one earlier.
"""

import argparse
import glob
import itertools
import logging
import math
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterator, ShardedIterator
from fairseq.file_io import PathManager

from fairseq_tutel.checkpoint.files import (
    NOT_CHECKPOINTS,
    has_an_end,
    identity,
    is_whole,
    unlike_a_file,
)
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.moe.config import options_of
from fairseq_tutel.moe.options import plain
from fairseq_tutel.ranks import groups, world
from fairseq_tutel.ranks.guard import name_ranks
from fairseq_tutel.ranks.world import Work, of_first

logger = logging.getLogger(__name__)

# What a rank can find in the place of a local file that is whole.
NOTHING, TORN, ELSEWHERE = "nothing", "torn", "no local file"
# What a training saves beside checkpoint_last.pt; files of other names may be of other trainings.
SAVED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")


def checkpoint_to_load(cfg: Any) -> str | None:
    """Return the path of the checkpoint that a training will go on from, or None. Collective.

    Where checkpoint_last.pt is not there but others are, as when the disk was full at the first save, it is
    the newest whole one of them, and `cfg` is changed to name it.

    Args:
        cfg: the checkpoint part of the FairseqConfig of a training.

    Raises:
        ValueError: it is not there, on one of the nodes it is not whole, or ranks find several; on all
            ranks alike.
    """
    newest = of_first(lambda: _newest_saved(cfg), "rank 0's look for a checkpoint")
    if newest is not None:
        path = os.path.join(cfg.save_dir, newest)
        cfg.restore_file, cfg.continue_once, cfg.finetune_from_model = path, None, None
    flag, path = flag_and_path(cfg)
    found = _found_by_all(path)
    if TORN in found:
        raise ValueError(_torn(flag, path))
    if any(other != found[0] for other in found):
        raise ValueError(_several(flag, path, found))
    if found[0] in NOT_CHECKPOINTS:
        raise ValueError(f"{flag} is {path}, which is {found[0]}; give a checkpoint file.")
    # Scripts that start a job again name the last checkpoint on the first start too.
    if found[0] == NOTHING and os.path.abspath(path) != os.path.abspath(_last(cfg)):
        # Stock would train from scratch.
        raise ValueError(
            f"{flag} is {path}, which does not exist; give a path from the current folder, or drop it."
        )
    if found[0] == NOTHING:
        _warn_of_checkpoints_beside(path)
    return None if found[0] in (NOTHING, ELSEWHERE) else path


def flag_and_path(cfg: Any) -> tuple[str, str]:
    """Return what names the checkpoint that a training begins with, in the order in which stock looks.

    Args:
        cfg: the checkpoint part of the FairseqConfig of a training.
    """
    path = _restored(cfg)
    if path == _last(cfg) and not os.path.lexists(path):
        if cfg.continue_once is not None:
            return "--continue-once", cfg.continue_once
        if cfg.finetune_from_model is not None:
            return "--finetune-from-model", cfg.finetune_from_model
    return "--restore-file", path


def _last(cfg: Any) -> str:
    return os.path.join(cfg.save_dir, f"checkpoint_last{cfg.checkpoint_suffix or ''}.pt")


def _restored(cfg: Any) -> str:
    if cfg.restore_file == "checkpoint_last.pt":
        return _last(cfg)
    return cfg.restore_file.replace(".pt", f"{cfg.checkpoint_suffix or ''}.pt")


def _newest_saved(cfg: Any) -> str | None:
    """Return the name of the newest whole checkpoint in --save-dir where it stands in for the last one.

    Raises:
        ValueError: there are some, and none is whole.
    """
    begin, path, last = cfg.continue_once or cfg.finetune_from_model, _restored(cfg), _last(cfg)
    if (
        cfg.restore_file == "checkpoint_last.pt"
        and not cfg.checkpoint_suffix
        and os.path.isfile(last)
    ):
        return _newer_than(last)
    is_wanted = os.path.abspath(path) == os.path.abspath(last) and not (
        PathManager.exists(last) or os.path.lexists(last)
    )
    begins_here = begin is not None and os.path.dirname(os.path.abspath(begin)) == os.path.abspath(
        cfg.save_dir
    )
    if cfg.checkpoint_suffix or not is_wanted or begins_here or not os.path.isdir(cfg.save_dir):
        return None
    names = [name for name in os.listdir(cfg.save_dir) if SAVED.fullmatch(name)]
    by_updates = [(updates_of(os.path.join(cfg.save_dir, name)), name) for name in names]
    for updates, name in sorted(by_updates, reverse=True):
        if updates >= 0 and is_whole(os.path.join(cfg.save_dir, name)):
            logger.warning(
                "there is no %s: the training goes on from %s (update %d), the newest whole checkpoint in "
                "--save-dir%s; give another --save-dir to begin anew",
                last,
                name,
                updates,
                f", not from {begin}" if begin is not None else "",
            )
            return name
    if names:
        raise ValueError(
            f"--save-dir is {cfg.save_dir}, which has no checkpoint_last.pt to go on from, and none of its "
            f"{len(names)} other checkpoints is whole; give another --save-dir to begin anew, or "
            "--restore-file with a checkpoint from elsewhere."
        )
    return None


def _newer_than(last: str) -> str | None:
    """Return the name of a whole checkpoint that was saved after checkpoint_last.pt; None for none.

    That is a later update whose file also got its content and its name later. A checkpoint that a user put
    in the place of the last one got its name last.
    """
    folder, own = os.path.dirname(last), os.stat(last)
    names = filter(SAVED.fullmatch, os.listdir(folder))
    paths = list(filter(os.path.isfile, (os.path.join(folder, name) for name in names)))
    if not paths:
        return None
    written = {path: os.stat(path) for path in paths}
    later = [
        (updates_of(path), path)
        for path, status in written.items()
        if status.st_mtime_ns > own.st_mtime_ns and status.st_ctime_ns > own.st_ctime_ns
    ]
    updates_of_last = updates_of(last)
    for updates, path in sorted(later, reverse=True):
        if updates > updates_of_last and is_whole(path):
            logger.warning(
                "the training goes on from %s (update %d), which was saved after checkpoint_last.pt (%s), "
                "as when the disk was full between the two; give --restore-file %s to go on from that one",
                os.path.basename(path),
                updates,
                f"update {updates_of_last}" if updates_of_last >= 0 else "corrupt",
                last,
            )
            return os.path.basename(path)
    newest = max(paths, key=lambda path: written[path].st_mtime_ns)
    updates = updates_of(newest)
    if 0 <= updates_of_last < updates:
        logger.warning(
            "the training goes on from %s (update %d), which was put there after update %d was saved; give "
            "--restore-file %s to go on from that one",
            *(last, updates_of_last, updates, newest),
        )
    return None


def updates_of(path: str) -> int:
    """Return after how many updates a file was saved; -1 where it is torn, or its shards are missing."""
    if not os.path.isfile(path):
        return -1  # a pipe would be waited for
    try:
        state = mapped(path)
        bind(state, Path(path))
        return int(state["optimizer_history"][-1]["num_updates"])
    except Exception:  # torch has no exception of its own for what it can not read
        return -1


def mapped(path: str) -> dict[str, Any]:
    """Return a checkpoint whose tensors stay on disk."""
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def _found_by_all(path: str) -> list[str]:
    """Return what every rank finds at its path: one of the words above, or a file's identity.

    Of the ranks that share a file the first reads all of it.
    """
    own = _found(path)
    operation = "the look at the checkpoint"
    told = world.told_by_all((own, _inode(path)), operation)
    is_file = own not in (NOTHING, TORN, ELSEWHERE, *NOT_CHECKPOINTS)
    reads = is_file and told.index(told[world.rank()]) == world.rank()
    reading = Work(lambda: is_whole(path) if reads else True)
    # A look at a time: a large file takes longer than ranks wait for each other.
    while True:
        ended, whole, error = reading.look()
        if all(world.told_by_all(ended, operation)):
            return world.told_by_all(own if whole and error is None else TORN, operation)


def _found(path: str) -> str:
    kind = unlike_a_file(path)
    if kind is not None:
        return kind
    if not os.path.isfile(path):
        return ELSEWHERE if PathManager.exists(path) else NOTHING
    return identity(path) if has_an_end(path) else TORN


def _inode(path: str) -> tuple[int, ...]:
    """Return what tells a file from its copies on other nodes, whose disks may have damaged them."""
    if not os.path.isfile(path):
        return ()
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _torn(flag: str, path: str) -> str:
    others = _checkpoints_beside(path)
    such_as = f", such as --restore-file {others[0]}" if others else ""
    return (
        f"{flag} is {path}, which is torn (cut off while it was written, or changed on its disk); "
        f"remove it and give an older checkpoint{such_as}."
    )


def _several(flag: str, path: str, found: Sequence[str]) -> str:
    """Say which ranks would go on from something else than rank 0, as with folders of one node each."""
    ranks = [rank for rank, other in enumerate(found) if other != found[0]]
    if found[0] == NOTHING:
        what = "does not exist for rank 0, but does"
    elif all(found[rank] == NOTHING for rank in ranks):
        what = "exists for rank 0, but not"
    else:
        what = "is one checkpoint for rank 0 and another"
    return (
        f"{flag} is {path}, which {what} for {name_ranks(ranks)}; give a --save-dir, or file, that all "
        "ranks share, or copy rank 0's to the same place on every node."
    )


def _warn_of_checkpoints_beside(path: str) -> None:
    others = _checkpoints_beside(path)
    if others and int(os.environ.get("RANK", 0)) == 0:
        logger.warning(
            "there is no %s, but %d other checkpoints beside: the training starts from the beginning; give "
            "--restore-file %s to go on",
            path,
            len(others),
            others[0],
        )


def _checkpoints_beside(path: str) -> list[str]:
    """Return the other checkpoints of a folder, the newest first."""
    found = set(glob.glob(os.path.join(os.path.dirname(path), "checkpoint*.pt"))) - {path}
    return sorted(found, key=os.path.getmtime, reverse=True)


def say_what_changed(path: str | None, cfg: Any) -> None:
    """Log the experts' options that differ between a checkpoint's model and this one's.

    Args:
        path: of the checkpoint that training will go on from; None for none.
        cfg: the configuration of the model that is built.
    """
    if path is None or groups.in_use().rank > 0 or not zipfile.is_zipfile(path):
        return
    try:
        state = mapped(path)
    except pickle.UnpicklingError:
        return  # the load itself will refuse it, on every rank
    saved = (state.get("cfg") or {}).get("model")
    # A dictionary, or what was on the command line.
    saved = saved if isinstance(saved, dict) else vars(saved or argparse.Namespace())
    if "moe_freq" not in saved:
        return
    changed = []
    for option in options_of("model"):
        before = str(plain(saved.get(option.key, option.default)))
        now = str(plain(getattr(cfg, option.key, option.default)))
        if before != now:
            changed.append(f"{option.flag} {before} (now {now})")
    if changed:
        logger.warning("the checkpoint was trained with %s", ", ".join(changed))


@dataclass(frozen=True)
class _Resumed:
    """The epoch that was resumed on a place that per-rank offsets cannot express."""

    epoch: int
    consumed: int
    start: int
    order_shards: int


class ElasticEpochBatchIterator(EpochBatchIterator):
    """EpochBatchIterator whose state says how many global batches were consumed.

    Attributes:
        update_freq: micro-batches of an update in each epoch, the last number for all that follow.
    """

    update_freq: Sequence[int] = (1,)
    num_shards: int
    shard_id: int
    _resumed: _Resumed | None = None
    _start = 0

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
        # Stock loses the end of an epoch that begins in the middle of an update.
        update_freq = self._update_freq_in(state_dict["epoch"])
        start = math.ceil(consumed / (self.num_shards * update_freq)) * update_freq
        same_place = consumed == start * self.num_shards
        if consumed > 0 and not (same_place and saved_shards == self.num_shards):
            self._resumed = _Resumed(state_dict["epoch"], consumed, start, saved_shards)
        super().load_state_dict({**state_dict, "iterations_in_epoch": start})

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> Any:
        self._start = offset
        return super()._get_iterator_for_epoch(epoch, shuffle, fix_batches_to_gpus, offset)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        """Return this rank's batches of the epoch, in order; one that only fills up ends no update."""
        batches = self._in_order(epoch, fix_batches_to_gpus, shuffle)
        update_freq = self._update_freq_in(epoch)
        in_last_update = (len(batches) - self._start - 1) % update_freq + 1
        if in_last_update > 1 and len(batches[-1]) == 0 and not self.skip_remainder_batch:
            batches[-2:] = batches[-1], batches[-2]
        return batches

    def _update_freq_in(self, epoch: int) -> int:
        return self.update_freq[min(epoch, len(self.update_freq)) - 1]

    def _in_order(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
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

        Where the order depends on their number (grouped shuffling, batches fixed to GPUs), every shard is
        asked for; else there is one shuffle for all.
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
