"""Writes sharded checkpoints in threads while training continues (--moe-save-async).

At the end of an update, `begin` copies the state of all ranks to host memory. A thread of each rank then
writes the rank's experts, and waits for the threads of all other ranks. The thread of rank 0 renames the
folder of the experts, and calls fairseq's save_checkpoint, which writes the checkpoint file. Every file is
flushed to disk before it is renamed, as in a save that blocks training.
"""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fairseq import utils

from fairseq_tutel.checkpoint import atomic_save, experts
from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.checkpoint.shards import MARK
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.groups import group_of_threads
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.expert_states import ExpertStates

logger = logging.getLogger(__name__)

PENDING = "pending"  # This key marks a record that stands for a tensor of an unwritten shard file.
# After an error, `stop` waits at most this many half seconds for the end of the save thread.
LAST_LOOKS = 20


class _CancelledError(Exception):
    """Raised in a save thread to end the thread when the process ends."""


class BackgroundSave:
    """Saves checkpoints in the background, at most one at a time; `begin` and `finish` are collectives."""

    def __init__(self) -> None:
        self._work: world.Work | None = None
        self._group: dist.ProcessGroup | None = None  # The process group of all save threads.
        self._is_stopped = False

    def begin(
        self, original: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any, states: ExpertStates
    ) -> None:
        """Copy the training state of all ranks, and start a background save of the copy.

        `original` is fairseq's save_checkpoint; the arguments `cfg` to `val_loss` are passed to it.
        """
        if self._group is None and world.size() > 1:
            self._group = group_of_threads()
        without_files = copy.deepcopy(cfg)
        without_files.no_save = True
        original(without_files, trainer, epoch_itr, val_loss)  # This call updates only the best loss.
        trainer.consolidate_optimizer()
        model, topology = trainer.get_model(), RUN.topology
        folder = experts.begin_folder(Path(cfg.save_dir))
        copies = experts.CopiedExperts(model, topology, states.of)
        pending = {name: {MARK: 0, PENDING: list(name)} for name in copies.names}
        experts.save_as_records(model, pending)
        with states.saved_as(pending, topology):
            state = _copied(trainer.state_dict()) if world.is_first() else {}
        experts.release(model)
        held, iterator = _held(trainer, epoch_itr)
        updates = held.get_num_updates()

        def save(path: str, extra_state: dict[str, Any]) -> str:
            state["extra_state"].update(extra_state)
            with atomic_save.replacing(path) as temporary:
                atomic_save.write(state, temporary, self._check)
            return path

        def write() -> None:
            written = experts.gather_written(copies.write(folder, self._check), self._group)
            if world.is_first():
                _fill_in(state, experts.records_of(written, folder))
                held.save_checkpoint = save
                saved = original(cfg, held, iterator, val_loss)
                if saved is not None and hasattr(trainer.task, "post_save"):
                    trainer.task.post_save(saved, updates)

        logger.info("saving a checkpoint of update %d in the background", updates)
        self._work = world.Work(write)

    def finish(self) -> None:
        """Wait until the pending save, if any, has ended on all ranks.

        Raises:
            ValueError: a rank could not write its files.
        """
        if self._work is None:
            return
        ranks: list[Any] = [(False, None, None)]
        while not all(ended for ended, _, _ in ranks):
            ranks = world.all_gather_object(self._work.look(), "the end of a save in the background")
        self._work = None
        for _, _, sentence in ranks:
            if sentence is not None:
                raise ValueError(sentence)

    def stop(self) -> None:
        """After an error, end a pending background save; the next run removes its files."""
        self._is_stopped = True
        for _ in range(LAST_LOOKS):
            if self._work is None or self._work.look()[0]:
                return

    def _check(self, advance: object = None) -> None:
        """Raise an error if the process is ending; every write of a save thread calls `_check`."""
        if self._is_stopped:
            raise _CancelledError


def _held(trainer: Any, epoch_itr: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return copies of the trainer's and the iterator's state that fairseq's save_checkpoint reads."""
    task, updates = SimpleNamespace(), trainer.get_num_updates()
    if hasattr(trainer.task, "get_checkpoint_dict"):
        state = copy.deepcopy(trainer.task.get_checkpoint_dict())
        task.get_checkpoint_dict = lambda: state
    held = SimpleNamespace(
        data_parallel_rank=0,
        should_save_checkpoint_on_current_rank=True,
        checkpoint_suffix=trainer.checkpoint_suffix,
        task=task,
        consolidate_optimizer=lambda: None,
        get_num_updates=lambda: updates,
    )
    at_end, position = epoch_itr.end_of_epoch(), copy.deepcopy(epoch_itr.state_dict())
    end = {"end_of_epoch": lambda: at_end, "state_dict": lambda: position}
    return held, SimpleNamespace(epoch=epoch_itr.epoch, **end)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint's content to host memory that the model does not use."""
    in_use = {id(value) for _, _, value in walk(state)}
    moved = utils.move_to_cpu(state)
    # A tensor that was moved from a GPU or converted to a wider dtype is already a copy.
    copies = {id(v): v for _, _, v in walk(moved) if torch.is_tensor(v) and id(v) not in in_use}
    return copy.deepcopy(moved, copies)


def _fill_in(state: dict[str, Any], records: Mapping[tuple[str, str], Any]) -> None:
    """Replace, in place, each pending record in `state` by the record of its tensor in a shard file."""
    for container, key, value in walk(state):
        if isinstance(value, dict) and PENDING in value and MARK in value:
            container[key] = records[tuple(value[PENDING])]
