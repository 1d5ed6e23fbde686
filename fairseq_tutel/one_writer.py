"""A training holds the lease of its --save-dir from before its start to its end; rank 0 has it for all.

Two in one folder would remove each other's experts and overwrite each other's files.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fairseq.file_io import PathManager

from fairseq_tutel import shard_folder, whole_files
from fairseq_tutel.comm.guard import guarded
from fairseq_tutel.lease import NAME, Lease, take

_held: list[Lease] = []


class OneWriter:
    """A training's `main` for every rank; it can be pickled, for ranks that fairseq spawns."""

    def __init__(self, main: Any) -> None:
        self.main = main

    def __call__(self, cfg: Any, **kwargs: Any) -> Any:
        """Run `main` while no other training writes into --save-dir."""
        save_dir = cfg.checkpoint.save_dir
        writes = not (cfg.checkpoint.no_save or PathManager.path_requires_pathmanager(save_dir))
        with writing(save_dir) if writes else contextlib.nullcontext():
            return self.main(cfg, **kwargs)


@contextlib.contextmanager
def writing(save_dir: str) -> Iterator[None]:
    """Hold the lease of a folder in the block. Collective at its beginning.

    Raises:
        ValueError: another training writes there, or the lease could not be written; on all ranks alike.
    """
    lease = _taken_by_first(save_dir)
    if lease is None:
        yield
        return
    _held.append(lease)
    try:
        _tidy(Path(save_dir), all_is_old=lease.after is not None)
        yield
        shard_folder.collect(Path(save_dir))
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


def _taken_by_first(save_dir: str) -> Lease | None:
    """Return the lease on rank 0, and None on the others, which wait for it."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    first = not together or dist.get_rank() == 0
    attempt = take(save_dir)
    while True:
        # Whether it is decided, and how; a try at a time, since ranks wait for so long only.
        decided: list[Any] = [False, None]
        lease = None
        if first:
            try:
                next(attempt)
            except StopIteration as taken:
                decided, lease = [True, None], taken.value
            except ValueError as error:
                decided = [True, str(error)]
            except OSError as error:
                path = str(Path(save_dir) / NAME)
                decided = [True, str(whole_files.unwritten(path, error))]
        if together:
            with guarded("rank 0's look at who writes into --save-dir"):
                dist.broadcast_object_list(decided, src=0)
        if decided[1] is not None:
            raise ValueError(decided[1])
        if decided[0]:
            return lease


def _tidy(save_dir: Path, all_is_old: bool) -> None:
    """Remove what was cut off in the middle: all of it where its writer is gone, else what is old."""
    age = 0 if all_is_old else shard_folder.YOUNG_SECONDS
    shard_folder.remove_cut_off(save_dir, age)
    for file in save_dir.iterdir():
        if whole_files.is_temporary(file.name) and time.time() - file.stat().st_mtime >= age:
            file.unlink(missing_ok=True)
