"""Saves checkpoints with all ranks' experts, and prevents other runs from writing to --save-dir.

Rank 0 locks --save-dir. Without this lock, two runs with the same --save-dir would remove each other's
experts and overwrite each other's files. A function with the parameter `original` wraps a fairseq function
(see `registration/wrapped.py`).
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.file_io import PathManager

from fairseq_tutel.checkpoint import atomic_save, experts, folders
from fairseq_tutel.checkpoint.lock import locked
from fairseq_tutel.files import is_temporary
from fairseq_tutel.option import read
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.signals import SignalWatch
from fairseq_tutel.parallel.world import run_on_rank_zero
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.run_state import RUN, config_of
from fairseq_tutel.plugin.training import finite
from fairseq_tutel.plugin.training.background_save import BackgroundSave
from fairseq_tutel.plugin.training.expert_states import ExpertStates
from fairseq_tutel.plugin.training.loop import wrapping
from fairseq_tutel.plugin.training.options import TaskConfig
from fairseq_tutel.plugin.training.own_layers import MoETrainer
from fairseq_tutel.plugin.training.preemption import Preemption, end_process
from fairseq_tutel.plugin.training.resume import check_checkpoint

logger = logging.getLogger(__name__)


class SaveSession:
    """Holds a run's background save and number of saves, which save_checkpoint cannot get as arguments."""

    def __init__(self) -> None:
        self.background: BackgroundSave | None = None  # None without --moe-save-async.
        self.count = 0  # Number of finished calls of save_checkpoint.

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Context manager in which sharded checkpoints are saved in the background. Collective."""
        self.background = BackgroundSave()
        try:
            yield
            self.background.finish()
        finally:
            self.background.stop()
            self.background = None

    def save(self, original: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        """Save a checkpoint with `original`, fairseq's save_checkpoint function. Collective."""
        if cfg.no_save:
            return original(cfg, trainer, epoch_itr, val_loss)
        background, path = self.background, None
        if background is not None:
            background.finish()
        finite.refuse_to_save(trainer)
        states = _states_in_shards(cfg, trainer)
        if background is not None and states is not None:
            background.begin(original, cfg, trainer, epoch_itr, val_loss, states)
        else:
            with _completed(cfg, trainer, states):
                path = original(cfg, trainer, epoch_itr, val_loss)
        self.count += 1
        return path


SESSION = SaveSession()


def run_training(main: Any, cfg: Any, signals: SignalWatch | None = None, **kwargs: Any) -> Any:
    """Run fairseq's training function; meanwhile, no other run may write to --save-dir.

    Before training, the checkpoint from which the run resumes is checked. A signal that `signals` receives
    ends the run after an update.
    """
    save_dir = cfg.checkpoint.save_dir
    writes = not (cfg.checkpoint.no_save or PathManager.path_requires_pathmanager(save_dir))
    in_background = read(TaskConfig, getattr(cfg, "task", None)).moe_save_async and writes
    preemption = None if signals is None else Preemption(signals, lambda: SESSION.count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(writing(save_dir, writes))
        if preemption is not None:
            stack.enter_context(preemption.installed(main))
        if in_background:
            stack.enter_context(SESSION.in_background())
        stack.enter_context(wrapping(main, Trainer=lambda _: MoETrainer))
        # With FSDP's sharded state, each rank has a different file, whose suffix fairseq sets later.
        if not cfg.distributed_training.use_sharded_state:
            check_checkpoint(cfg.checkpoint)
        result = main(cfg, **kwargs)
    if preemption is not None and preemption.result:
        end_process(preemption.result)
    return result


@contextlib.contextmanager
def writing(save_dir: str, writes: bool = True) -> Iterator[None]:
    """Context manager that prevents other runs from writing to a folder; entering is a collective."""
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            try:
                if writes and stack.enter_context(locked(save_dir)):
                    _remove_temporary(Path(save_dir))
            except OSError as error:
                raise ValueError(atomic_save.unwritable(save_dir, error)) from error

        run_on_rank_zero(lock, "rank 0's lock of --save-dir")
        try:
            yield
        finally:
            if writes and world.is_first():
                try:
                    # Unused expert folders may have filled the disk, so they are deleted after errors, too.
                    folders.collect(Path(save_dir))
                except OSError as error:
                    logger.warning("unreferenced expert files may remain in %s: %s", save_dir, error)


def _remove_temporary(save_dir: Path) -> None:
    """Remove incomplete files and folders of earlier runs from --save-dir."""
    folders.remove_cut_off(save_dir, 0)
    for file in save_dir.iterdir():
        if is_temporary(file.name):
            with contextlib.suppress(OSError):  # Another user may own the file.
                file.unlink()


def save_checkpoint(original: Any) -> Any:
    """Wrap fairseq's save_checkpoint to save the experts and optimizer state of all ranks.

    Experts are gathered on rank 0 or, with `--moe-checkpoint sharded`, written by each rank.
    """

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        return SESSION.save(original, cfg, trainer, epoch_itr, val_loss)

    return wrapper


@contextlib.contextmanager
def _completed(cfg: Any, trainer: Any, states: ExpertStates | None) -> Iterator[None]:
    """Context manager in which fairseq saves all ranks' experts and optimizer state. Collective.

    The context manager gathers experts and optimizer state or, with `states`, writes them to shard files.
    """
    inner, topology = innermost_optimizer(trainer.optimizer), RUN.topology
    model = trainer.get_model()
    has_experts = bool(experts.expert_modules(model))
    shared = (topology.expert_parallel_size > 1 and has_experts) or getattr(inner, "is_apart", False)
    with contextlib.ExitStack() as until_saved:
        if states is not None:
            save_dir = Path(trainer.cfg.checkpoint.save_dir)
            records = experts.save_in_shards(model, topology, states.of, save_dir)
            until_saved.enter_context(states.saved_as(records, topology))
        elif shared:
            experts.gather_experts(model, topology)
            if not cfg.no_save_optimizer_state:
                inner.gather_state(topology)
            if trainer.ema is not None:
                until_saved.enter_context(trainer.ema.gathered(topology))
        try:
            yield
        finally:
            experts.release(model)


def _states_in_shards(cfg: Any, trainer: Any) -> ExpertStates | None:
    """Return the experts' state to write to shard files, or None if this checkpoint has no shard files."""
    options = read(TaskConfig, config_of(trainer.task))
    if options.moe_checkpoint != "sharded" or not experts.expert_modules(trainer.get_model()):
        return None
    inner = innermost_optimizer(trainer.optimizer)
    # A composite optimizer has no `state`. It works on one rank only, so the checkpoint file has its state.
    by_parameter = not cfg.no_save_optimizer_state and hasattr(inner.optimizer, "state")
    return ExpertStates(trainer, inner if by_parameter else None, trainer.ema)


def copy(original: Any) -> Any:
    """Wrap fairseq's PathManager.copy so that an interrupted copy leaves no truncated checkpoint."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        # If the destination is a link, replace the link's target, to which fairseq would also write.
        with atomic_save.replacing(os.path.realpath(dst_path)) as temporary:
            copied = original(src_path, temporary, True)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def persistent_save(original: Any) -> Any:
    """Wrap fairseq's torch_persistent_save to write a new temporary file in each attempt."""

    @functools.wraps(original)
    def wrapper(obj: Any, filename: Any, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            original(obj, filename, async_write)
        else:
            atomic_save.save(obj, filename)

    return wrapper
