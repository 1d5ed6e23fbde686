"""Writes sharded checkpoints in threads while training continues (--moe-save-async).

A save has three steps, each at the end of an update:

1. `begin`: all ranks copy the state to host memory, and start threads that write the experts.
2. When all ranks have written their experts, their folder is renamed. A thread of rank 0 writes the file
   with the other parameters under a temporary name.
3. `_Save.commit`: fairseq's save_checkpoint gives this file its name, copies it, and deletes old files.

Ranks add up how many have finished a step with fairseq's own sums (`loop.Votes`). Every file is flushed to
disk before it is renamed, in the same order as in a save that blocks training.
"""

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import utils

from fairseq_tutel.checkpoint import atomic_save, experts
from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.checkpoint.shards import MARK
from fairseq_tutel.files import temporary_of
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.world import Work, run_on_rank_zero
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.expert_states import ExpertStates
from fairseq_tutel.plugin.training.loop import Votes, wrapping

logger = logging.getLogger(__name__)

PENDING = "pending"  # in the state of rank 0, marks a record whose shard files are not yet written


class _TargetFoundError(Exception):
    """Ends a call of fairseq's save_checkpoint that only finds out which file it would write."""


class _CancelledError(Exception):
    """Ends a thread because the process ends."""


class _Save:
    """One checkpoint that is being written. Rank 0 holds the state that goes into its file.

    `work` is the thread that writes, and `writes_experts` is false when the experts are written.
    """

    def __init__(self, original: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> None:
        epoch, at_end, position = epoch_itr.epoch, epoch_itr.end_of_epoch(), epoch_itr.state_dict()
        iterator = SimpleNamespace(epoch=epoch, end_of_epoch=lambda: at_end, state_dict=lambda: position)
        self._arguments = original, cfg, iterator, val_loss
        self._task, self.updates = trainer.task, trainer.get_num_updates()
        self._facts = {
            name: getattr(trainer, name)
            for name in (
                "data_parallel_rank",
                "should_save_checkpoint_on_current_rank",
                "checkpoint_suffix",
            )
        }
        self.path: str | None = None  # of the file that rank 0 writes first
        self._extra_state: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._folder = Path()
        self.work: Work | None = None
        self.writes_experts = True  # or the other parameters

    def find_target(self) -> bool:
        """Return whether fairseq would save any file; set its path on rank 0. Collective."""

        def found(path: str, extra_state: dict[str, Any]) -> None:
            self.path, self._extra_state = path, extra_state
            raise _TargetFoundError

        with contextlib.suppress(_TargetFoundError):
            self._call(found)
        return bool(world.broadcast_object(self.path is not None, "the start of a save"))

    def hold(self, state: dict[str, Any]) -> None:
        """Keep the trainer's state dict, which the file gets."""
        self._state = state
        state["extra_state"].update(copy.deepcopy(self._extra_state))

    def write_experts(
        self, folder: Path, copies: experts.CopiedExperts, check: Callable[..., None]
    ) -> None:
        """Start to write this rank's experts; `check` raises an error if the process ends."""
        self._folder, self.work = folder, Work(lambda: copies.write(folder, check))

    def write_file(self, check: Callable[..., None]) -> None:
        """Rename the folder of the experts; start to write the file on rank 0. Collective."""
        self._raise_error()
        assert self.work is not None
        records = experts.commit_folder(self._folder, self.work.result)
        self.writes_experts, self.work = False, None
        if self.path is not None:
            _fill_in(self._state, records)
            self.work = Work(lambda: self._write_file(check))

    def commit(self) -> None:
        """Call fairseq's save_checkpoint on rank 0; rename the written file where it would write.

        Raises:
            ValueError: a file could not be written.
        """
        assert self.path is not None

        def rename(path: str, extra_state: dict[str, Any]) -> str:
            try:
                os.replace(self.temporary, path)
            except OSError as error:
                raise atomic_save.unwritten(path, error) from error
            return path

        try:
            self._raise_error()
            # Until here, an error leaves all earlier checkpoints as they are.
            saved = self._call(rename)
        except OSError as error:
            # The str of an OSError begins with its number; the message of `unwritten` is a sentence.
            raise ValueError(str(error) if error.filename else error.args[-1]) from error
        if saved is not None and hasattr(self._task, "post_save"):
            self._task.post_save(saved, self.updates)

    def _raise_error(self) -> None:
        assert self.work is not None
        if self.work.error is not None:
            raise self.work.error

    def _write_file(self, check: Callable[..., None]) -> None:
        assert self.path is not None
        try:
            atomic_save.write(self._state, self.temporary, check)
        except Exception as error:
            with contextlib.suppress(OSError):
                os.remove(self.temporary)
            raise atomic_save.unwritten(self.path, error) from error
        self._state = {}

    @functools.cached_property
    def temporary(self) -> str:
        """The name under which rank 0 writes the file."""
        assert self.path is not None
        return temporary_of(self.path)

    def _call(self, save: Callable[[str, dict[str, Any]], Any]) -> Any:
        original, cfg, iterator, val_loss = self._arguments
        trainer = SimpleNamespace(
            **self._facts,
            task=self._task,
            consolidate_optimizer=lambda: None,
            always_call_state_dict_during_save_checkpoint=False,
            get_num_updates=lambda: self.updates,
            save_checkpoint=save,
        )
        return original(cfg, trainer, iterator, val_loss)


class BackgroundSave:
    """Saves checkpoints in the background: at most one at a time. All methods are collective."""

    def __init__(self) -> None:
        self._save: _Save | None = None
        self._votes = Votes(written=lambda: float(self._has_written()))
        self._has_joined = self._is_stopped = False

    @property
    def is_pending(self) -> bool:
        """Whether a save has begun that is not committed."""
        return self._save is not None

    @contextlib.contextmanager
    def installed(self, main: Any) -> Iterator[None]:
        """Context manager that continues a pending save after each update of fairseq's training loop.

        If the block raises an error, the pending save ends; the next run removes its files.
        """
        with wrapping(main, train=self._train, validate_and_save=self._validate_and_save):
            try:
                yield
            finally:
                self._is_stopped = True
                work = None if self._save is None else self._save.work
                while work is not None and not work.has_ended:
                    work.look()

    def _train(self, original: Any) -> Any:
        @functools.wraps(original)
        def train(cfg: Any, trainer: Any, *args: Any) -> Any:
            if not self._has_joined:
                self._has_joined = True
                self._votes.join(trainer)
            return original(cfg, trainer, *args)

        return train

    def _validate_and_save(self, original: Any) -> Any:
        @functools.wraps(original)
        def validate_and_save(cfg: Any, trainer: Any, *args: Any) -> Any:
            if self._save is not None and self._votes.total("written") == world.size():
                self._step()
            return original(cfg, trainer, *args)

        return validate_and_save

    def begin(
        self, original: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any, states: ExpertStates
    ) -> None:
        """Copy the state of all ranks, and start to write it.

        `original` is fairseq's save_checkpoint, which gets the next four arguments.
        """
        save = _Save(original, cfg, trainer, epoch_itr, val_loss)
        if not save.find_target():
            return
        trainer.consolidate_optimizer()  # as fairseq does
        model, topology = trainer.get_model(), RUN.topology
        folder = experts.begin_folder(Path(cfg.save_dir))
        copies = experts.CopiedExperts(model, topology, states.of)
        pending = {name: {MARK: 0, PENDING: list(name)} for name in copies.names}
        experts.save_as_records(model, pending)
        with states.saved_as(pending, topology):
            if save.path is not None:
                save.hold(_copied(trainer.state_dict()))
        experts.release(model)
        save.write_experts(folder, copies, self._check)
        self._save = save
        logger.info("saving a checkpoint of update %d in the background", save.updates)

    def finish(self) -> None:
        """Wait until the pending save, if any, is committed."""
        while self._save is not None:
            work = self._save.work
            ended = work is None or work.look()[0]
            if all(world.all_gather_object(ended, "the end of a save in the background")):
                self._step()

    def _has_written(self) -> bool:
        save = self._save
        return save is None or save.work is None or save.work.has_ended

    def _check(self, advance: object = None) -> None:
        if self._is_stopped:
            raise _CancelledError

    def _step(self) -> None:
        """Take the next step of a save whose threads have ended on all ranks."""
        save = self._save
        assert save is not None
        if save.writes_experts:
            save.write_file(self._check)
            return
        run_on_rank_zero(save.commit, "rank 0's end of a save in the background")
        self._save = None


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content in host memory, without memory in common with the model."""
    in_use = {id(value) for _, _, value in walk(state)}
    moved = utils.move_to_cpu(state)
    # Tensors from a GPU, and widened ones, are copies already.
    copies = {id(v): v for _, _, v in walk(moved) if torch.is_tensor(v) and id(v) not in in_use}
    return copy.deepcopy(moved, copies)


def _fill_in(state: dict[str, Any], records: Any) -> None:
    """Replace the marks of pending records by the records, in place."""
    for container, key, value in walk(state):
        if isinstance(value, dict) and PENDING in value and MARK in value:
            container[key] = records[tuple(value[PENDING])]
