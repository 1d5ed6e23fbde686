"""Saves complete checkpoints with all ranks' experts, and keeps other runs from writing to --save-dir.

Rank 0 locks --save-dir. Without the lock, two runs would remove each other's experts and overwrite each
other's files. Functions with the parameter `original` wrap a fairseq function; see
`registration/wrapped.py`.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_tutel.checkpoint import atomic_save, experts, folders
from fairseq_tutel.checkpoint.lock import locked
from fairseq_tutel.files import is_temporary
from fairseq_tutel.option import read
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.world import run_on_rank_zero
from fairseq_tutel.plugin.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin, innermost_optimizer
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training import finite, memory
from fairseq_tutel.plugin.training.background_save import BackgroundSave
from fairseq_tutel.plugin.training.ema import ExpertEMA
from fairseq_tutel.plugin.training.expert_states import ExpertStates
from fairseq_tutel.plugin.training.options import TaskConfig
from fairseq_tutel.plugin.training.own_layers import prepared
from fairseq_tutel.plugin.training.preemption import Preemption, end_process
from fairseq_tutel.plugin.training.resume import checkpoint_to_load
from fairseq_tutel.plugin.training.startup import saves_shards

logger = logging.getLogger(__name__)


def run_training(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's training `main` while no other run may write to --save-dir.

    The checkpoint from which the run resumes is checked first.
    """
    save_dir = cfg.checkpoint.save_dir
    writes = not (cfg.checkpoint.no_save or PathManager.path_requires_pathmanager(save_dir))
    preemption = None if RUN.signals is None else Preemption(RUN.signals)
    at_signals = contextlib.nullcontext() if preemption is None else preemption.installed(main)
    options = read(TaskConfig, getattr(cfg, "task", None))
    background = BackgroundSave(_states_in_shards) if options.moe_save_async and writes else None
    in_background = contextlib.nullcontext() if background is None else background.installed(main)
    explained = memory.refused_in_training(main)
    checked = finite.checked_at_start(main)
    with writing(save_dir, writes), checked, explained, at_signals, in_background, prepared(main):
        # With FSDP's sharded state, each rank has its own file, whose suffix is set later.
        sharded = cfg.distributed_training.use_sharded_state
        given, saves = cfg.checkpoint.restore_file, RUN.num_saves
        checkpoint = None if sharded else checkpoint_to_load(cfg.checkpoint)
        replaces_last = cfg.checkpoint.restore_file != given
        with RUN.having(checkpoint=checkpoint, background=background):
            result = main(cfg, **kwargs)
            if background is not None:
                background.finish()
        is_preempted = preemption is not None and preemption.result
        if replaces_last and writes and RUN.num_saves == saves and not is_preempted:
            _update_last(cfg.checkpoint)
    if preemption is not None and preemption.result:
        end_process(preemption.result)
    return result


def _update_last(cfg: Any) -> None:
    """Copy the checkpoint from which the run resumed to checkpoint_last.pt. Collective.

    A kill between two copies of a save leaves an older checkpoint_last.pt, or none. If the next run saves
    nothing, for example because --max-update is reached, no save replaces it.
    """
    if cfg.no_last_checkpoints:
        return
    last = os.path.join(cfg.save_dir, "checkpoint_last.pt")

    def copy_newest() -> None:
        try:
            PathManager.copy(cfg.restore_file, last, overwrite=True)
        except OSError as error:
            raise ValueError(error.args[-1]) from error  # `unwritten` made the message
        name = os.path.basename(cfg.restore_file)
        logger.info("copied %s to checkpoint_last.pt, which was older or missing", name)

    run_on_rank_zero(copy_newest, "rank 0's copy to checkpoint_last.pt")


@contextlib.contextmanager
def writing(save_dir: str, writes: bool = True) -> Iterator[None]:
    """Context manager that keeps other runs from writing to a folder. Collective when it is entered."""
    with contextlib.ExitStack() as stack:
        held: list[bool] = []  # on rank 0

        def lock() -> None:
            try:
                if writes:
                    held.append(stack.enter_context(locked(save_dir)))
            except OSError as error:
                raise ValueError(atomic_save.unwritable(save_dir, error)) from error

        run_on_rank_zero(lock, "rank 0's lock of --save-dir")
        if held:
            _remove_temporary(Path(save_dir), all_is_old=held[0])
            # Also after an error: a full disk needs the space of experts without a checkpoint file.
            stack.callback(_collect, save_dir)
        yield


def _collect(save_dir: str) -> None:
    """Delete unreferenced expert folders."""
    try:
        folders.collect(Path(save_dir))
    except OSError as error:
        logger.warning("unreferenced expert files may remain in %s: %s", save_dir, error)


def _remove_temporary(save_dir: Path, all_is_old: bool) -> None:
    """Remove incomplete files and folders from --save-dir; keep recent ones unless `all_is_old`."""
    age = 0 if all_is_old else folders.YOUNG_SECONDS
    folders.remove_cut_off(save_dir, age)
    for file in save_dir.iterdir():
        if is_temporary(file.name):
            with contextlib.suppress(OSError):  # the file was removed, or belongs to another user
                if time.time() - file.stat().st_mtime >= age:
                    file.unlink()


def save_checkpoint(original: Any) -> Any:
    """Wrap fairseq's save_checkpoint to include the experts and optimizer state of all ranks.

    They are gathered on rank 0, or with --moe-checkpoint sharded written by each rank.
    """

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        if cfg.no_save:
            return original(cfg, trainer, epoch_itr, val_loss)
        if RUN.background is not None:
            RUN.background.finish()
        finite.refuse_to_save(trainer)
        with RUN.having(is_saving=True):
            states = None if RUN.background is None else _states_in_shards(cfg, trainer)
            if RUN.background is not None and states is not None:
                RUN.background.begin(original, cfg, trainer, epoch_itr, val_loss, states)
                path = None
            else:
                with _completed(cfg, trainer):
                    path = original(cfg, trainer, epoch_itr, val_loss)
        RUN.update(num_saves=RUN.num_saves + 1)
        return path

    return wrapper


@contextlib.contextmanager
def _completed(cfg: Any, trainer: Any) -> Iterator[None]:
    """Context manager in which a checkpoint has all ranks' experts and optimizer state. Collective.

    They are gathered, or written to shard files, when the context is entered.
    """
    inner, topology = innermost_optimizer(trainer.optimizer), RUN.topology
    model = trainer.get_model()
    has_experts = bool(experts.expert_modules(model))
    shared = (topology.expert_parallel_size > 1 and has_experts) or getattr(inner, "is_apart", False)
    ema = _expert_average(trainer)
    with contextlib.ExitStack() as until_saved:
        states = _states_in_shards(cfg, trainer)
        if states is not None:
            records = write_in_shards(trainer, states, topology)
            if ema is not None:
                until_saved.enter_context(ema.saved_with(records))
        elif shared:
            experts.gather_experts(model, topology)
            if not cfg.no_save_optimizer_state:
                inner.gather_state(topology)
            if ema is not None:
                until_saved.enter_context(ema.gathered(topology))
        try:
            yield
        finally:
            experts.release(model)


def _expert_average(trainer: Any) -> ExpertEMA | None:
    """Return the moving average of the weights (--store-ema) if the model has experts."""
    average = getattr(trainer, "ema", None)
    return average if isinstance(average, ExpertEMA) else None


def _states_in_shards(cfg: Any, trainer: Any) -> ExpertStates | None:
    """Return the tensors that shard files have besides the parameters; None if no experts are sharded."""
    if not (saves_shards(trainer.task) and experts.expert_modules(trainer.get_model())):
        return None
    return ExpertStates(trainer, _saved_by_parameter(cfg, trainer), _expert_average(trainer))


def _saved_by_parameter(cfg: Any, trainer: Any) -> MoEOptimizerMixin | None:
    """Return the optimizer if its state is saved in shards, otherwise None.

    The state of a composite optimizer, which works on one rank only, stays in the checkpoint file.
    """
    inner = innermost_optimizer(trainer.optimizer)
    return inner if not cfg.no_save_optimizer_state and hasattr(inner.optimizer, "state") else None


def write_in_shards(
    trainer: Trainer, states: ExpertStates, topology: Topology
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write the experts of every rank, their optimizer state and averages to shard files. Collective.

    The next checkpoint refers to these files. Returns the records by layer and name of the tensor.
    """
    save_dir = Path(trainer.cfg.checkpoint.save_dir)
    records = experts.save_in_shards(trainer.get_model(), topology, states.of, save_dir)
    if states.inner is not None:
        states.inner.save_state(states.by_index(records), topology)
    return records


def copy(original: Any) -> Any:
    """Wrap fairseq's PathManager.copy so that an interrupted copy leaves no truncated file."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        # Replace the target of a link, because fairseq also writes to the target.
        with atomic_save.replacing(os.path.realpath(dst_path)) as temporary:
            copied = original(src_path, temporary, True)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def persistent_save(original: Any) -> Any:
    """Wrap fairseq's torch_persistent_save so that each attempt writes a new temporary file."""

    @functools.wraps(original)
    def wrapper(obj: Any, filename: Any, async_write: bool = False) -> None:
        state = obj.get("last_optimizer_state") if isinstance(obj, dict) else None
        is_part = ONLY_OF_RANK in (state or {})
        if (is_part or RUN.topology.expert_parallel_size > 1) and not RUN.is_saving:
            # fairseq saves crash.pt after an exception, when the other ranks may be gone.
            name = os.path.basename(filename)
            logger.warning(
                "%s will hold only this rank's experts or shards, so training cannot resume from it", name
            )
        if async_write or not PathManager.supports_rename(filename):
            original(obj, filename, async_write)
        else:
            atomic_save.save(obj, filename)

    return wrapper
