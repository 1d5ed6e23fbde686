"""A training holds the lease of its --save-dir from before its start to its end; rank 0 has it for all.

Two in one folder would remove each other's experts and overwrite each other's files.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.file_io import PathManager

from fairseq_tutel.checkpoint import files, folders
from fairseq_tutel.checkpoint.lease import NAME, Lease, take
from fairseq_tutel.ranks.first import of_first

logger = logging.getLogger(__name__)

_held: list[Lease] = []


class OneWriter:
    """A training's `main` for every rank; it can be pickled, for ranks that fairseq spawns."""

    def __init__(self, main: Any) -> None:
        self.main = main

    def __call__(self, cfg: Any, **kwargs: Any) -> Any:
        """Run `main` while no other training writes into --save-dir."""
        save_dir = cfg.checkpoint.save_dir
        writes = not (cfg.checkpoint.no_save or PathManager.path_requires_pathmanager(save_dir))
        with writing(save_dir, writes):
            return self.main(cfg, **kwargs)


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
    attempt, taken = take(save_dir), []

    def is_taken() -> bool:
        if not writes:
            return True
        try:
            next(attempt)
        except StopIteration as end:
            taken.append(end.value)
        except OSError as error:
            sentence = files.unwritten(str(Path(save_dir) / NAME), error).args[-1]
            raise ValueError(sentence) from error
        return bool(taken)

    # A try at a time: another's lease may be watched for longer than ranks wait for each other.
    while not of_first(is_taken, "rank 0's look at who writes into --save-dir"):
        pass
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
