"""How a training writes: its --save-dir is its own, files are whole, and hold all ranks' experts.

A training holds the lease of its --save-dir from before its start to its end; rank 0 has it for all. Two in
one folder would remove each other's experts and overwrite each other's files.

The functions that take an original wrap one of fairseq's; `wrapped` says why.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_tutel.checkpoint import experts, files, folders
from fairseq_tutel.checkpoint.lease import NAME, Lease, take
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin, innermost_optimizer
from fairseq_tutel.plugin.training import finite
from fairseq_tutel.plugin.training.checks import saves_shards
from fairseq_tutel.ranks import groups
from fairseq_tutel.ranks.world import of_first

logger = logging.getLogger(__name__)

_held: list[Lease] = []


def run_as_only_writer(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run a training's `main` while no other one writes into --save-dir; for every rank."""
    save_dir = cfg.checkpoint.save_dir
    writes = not (cfg.checkpoint.no_save or PathManager.path_requires_pathmanager(save_dir))
    with writing(save_dir, writes), finite.checked_at_start(main):
        return main(cfg, **kwargs)


@contextlib.contextmanager
def writing(save_dir: str, writes: bool = True) -> Iterator[None]:
    """Hold the lease of a folder in the block. Collective at its beginning.

    Args:
        save_dir: of rank 0.
        writes: whether rank 0 will write there; others come here all the same.

    Raises:
        ValueError: another training writes there, or the lease could not be written; on all ranks alike.
    """
    lease = _taken_by_first(save_dir, writes)
    if lease is None:
        yield
        return
    _held.append(lease)
    try:
        _tidy(Path(save_dir), all_is_old=lease.after is not None)
        yield
        try:
            folders.collect(Path(save_dir))
        except OSError as error:  # the training has ended well
            logger.warning(
                "experts that no checkpoint names may be left in %s: %s", save_dir, error
            )
    finally:
        _held.remove(lease)
        lease.release()


def confirm() -> None:
    """Look whether --save-dir is still this training's, where this rank has its lease.

    Raises:
        ValueError: another training has taken it over.
    """
    for lease in _held:
        lease.confirm()


def _taken_by_first(save_dir: str, writes: bool) -> Lease | None:
    """Return the lease on rank 0 if it writes, and None on the others, which wait for it."""
    taken: list[Lease] = []

    def take_it() -> None:
        try:
            taken.append(take(save_dir))
        except OSError as error:
            sentence = files.unwritten(str(Path(save_dir) / NAME), error).args[-1]
            raise ValueError(sentence) from error

    of_first(take_it if writes else lambda: None, "rank 0's look at who writes into --save-dir")
    return taken[0] if taken else None


def _tidy(save_dir: Path, all_is_old: bool) -> None:
    """Remove what was cut off in the middle: all of it where its writer is gone, else what is old."""
    age = 0 if all_is_old else folders.YOUNG_SECONDS
    folders.remove_cut_off(save_dir, age)
    for file in save_dir.iterdir():
        if files.is_temporary(file.name):
            with contextlib.suppress(OSError):  # it is gone, or another user's
                if time.time() - file.stat().st_mtime >= age:
                    file.unlink()


# The save that runs, if any: what it writes has all ranks' experts.
_saving: list[Any] = []


def save_checkpoint(original: Any) -> Any:
    """Gather experts and their optimizer state to rank 0, or write them, then do what stock does."""

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        if cfg.no_save:
            return original(cfg, trainer, epoch_itr, val_loss)
        finite.refuse_to_save(trainer)
        _saving.append(trainer)
        try:
            _complete(cfg, trainer, epoch_itr, val_loss)
            return original(cfg, trainer, epoch_itr, val_loss)
        finally:
            _saving.pop()

    return wrapper


def _complete(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> None:
    """Let rank 0's next state hold what all ranks have, where ranks share it. Collective."""
    inner, place = innermost_optimizer(trainer.optimizer), groups.in_use()
    model = trainer.get_model()
    has_experts = bool(experts.expert_modules(model))
    in_shards = saves_shards(trainer.task) and has_experts
    shared = (place.expert_parallel_size > 1 and has_experts) or getattr(inner, "is_apart", False)
    if (in_shards or shared) and not will_save(cfg, trainer, epoch_itr, val_loss):
        return
    confirm()
    with_state = not cfg.no_save_optimizer_state
    if in_shards:
        # A composite optimizer, which one rank alone may have, keeps its states in the file.
        by_parameter = with_state and hasattr(inner.optimizer, "state")
        write_in_shards(trainer, inner if by_parameter else None, place)
    elif shared:
        experts.gather_experts(model, place)
        if with_state:
            inner.gather_state(place)


def will_save(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> bool:
    """Return whether stock, which asks all ranks for their parts first, will write a file. Collective.

    Args are those of `checkpoint_utils.save_checkpoint`, before it runs.
    """
    if not cfg.no_last_checkpoints:
        return True
    if epoch_itr.end_of_epoch():
        regular = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    else:
        updates, interval = trainer.get_num_updates(), cfg.save_interval_updates
        regular = interval > 0 and updates % interval == 0
    best_of = max if cfg.maximize_best_checkpoint_metric else min
    before = getattr(checkpoint_utils.save_checkpoint, "best", val_loss)
    best = val_loss is not None and val_loss == best_of(val_loss, before)
    among_best = val_loss is not None and cfg.keep_best_checkpoints > 0
    return of_first(lambda: regular or best or among_best, "the agreement on what is saved")


def write_in_shards(trainer: Trainer, inner: MoEOptimizerMixin | None, place: Any) -> None:
    """Let every rank write its experts, with their state; the checkpoint saved next says where. Collective.

    Args:
        trainer: that saves.
        inner: the optimizer whose state is saved; None for none.
        place: of this rank.
    """
    model, save_dir = trainer.get_model(), Path(trainer.cfg.checkpoint.save_dir)
    # The optimizer knows parameters by their place in this list, and where they are half, masters of them.
    trained = getattr(trainer.optimizer, "fp16_params", None) or (
        inner.model_params() if inner else []
    )
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}

    def states(parameter: Any) -> Any:
        index = index_of.get(id(parameter))
        return {} if inner is None or index is None else inner.expert_state(index)

    records = experts.save_in_shards(model, place, states, save_dir)
    if inner is None:
        return
    by_index: dict[int, dict[str, Any]] = {}
    for layer, stack in model.named_modules():
        if isinstance(stack, ExpertStack):
            for name, parameter in stack.expert_parameters().items():
                if id(parameter) in index_of:
                    by_index[index_of[id(parameter)]] = {
                        tensor.removeprefix(f"{name}."): record
                        for (of_layer, tensor), record in records.items()
                        if of_layer == layer and tensor.startswith(f"{name}.")
                    }
    inner.save_state(by_index, place)


def copy(original: Any) -> Any:
    """Copy under a temporary name, then rename: the destination is complete or what it was before."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        # Where a link leads, as stock does, which writes through it.
        with files.replacing(os.path.realpath(dst_path)) as temporary:
            copied = files.share(src_path, temporary) or original(src_path, temporary, True)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def persistent_save(original: Any) -> Any:
    """Write local files under a name of their own; a second try begins at the first byte."""

    @functools.wraps(original)
    def wrapper(obj: Any, filename: Any, async_write: bool = False) -> None:
        state = obj.get("last_optimizer_state") if isinstance(obj, dict) else None
        is_part = ONLY_OF_RANK in (state or {})
        if (is_part or groups.in_use().expert_parallel_size > 1) and not _saving:
            # As stock does on an exception; the other ranks may be gone.
            name = os.path.basename(filename)
            logger.warning(
                "%s will hold this rank's experts or shards only, and can not be resumed from", name
            )
        if async_write or not PathManager.supports_rename(filename):
            original(obj, filename, async_write)
        else:
            files.save(obj, filename)

    return wrapper
