"""The checkpoint that a training goes on from: which one, and whether all ranks have it, and whole."""

import glob
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from fairseq.file_io import PathManager

from fairseq_tutel.comm.guard import guarded, name_ranks
from fairseq_tutel.whole_files import has_an_end, identity, is_whole

logger = logging.getLogger(__name__)

# What a rank can find in the place of a local file that is whole.
NOTHING, FOLDER, TORN, ELSEWHERE = "nothing", "a folder", "torn", "no local file"


def checkpoint_to_load(cfg: Any) -> str | None:
    """Return the path of the checkpoint that a training will go on from, or None. Collective.

    Args:
        cfg: the checkpoint part of the FairseqConfig of a training.

    Raises:
        ValueError: it is not there, on one of the nodes it is not whole, or ranks find several; on all
            ranks alike.
    """
    suffix = f"{cfg.checkpoint_suffix or ''}.pt"
    last = os.path.join(cfg.save_dir, "checkpoint_last" + suffix)
    flag, path = "--restore-file", last
    if cfg.restore_file != "checkpoint_last.pt":
        path = cfg.restore_file.replace(".pt", suffix)
    elif not os.path.exists(last):  # what begins a training, in the order in which stock looks
        if cfg.continue_once is not None:
            flag, path = "--continue-once", cfg.continue_once
        elif cfg.finetune_from_model is not None:
            flag, path = "--finetune-from-model", cfg.finetune_from_model
    found = _found_by_all(path)
    if TORN in found:
        raise ValueError(_torn(flag, path))
    if any(other != found[0] for other in found):
        raise ValueError(_several(flag, path, found))
    if found[0] == FOLDER:
        raise ValueError(f"{flag} is {path}, a folder; name a checkpoint file in it.")
    # Scripts that start a job again name the last checkpoint on the first start too.
    if found[0] == NOTHING and os.path.abspath(path) != os.path.abspath(last):
        # Stock would train from scratch.
        raise ValueError(
            f"{flag} is {path}, which does not exist; give a path from the current folder, or drop it."
        )
    if found[0] == NOTHING:
        _warn_of_checkpoints_beside(path)
    return None if found[0] in (NOTHING, ELSEWHERE) else path


def _found_by_all(path: str) -> list[str]:
    """Return what every rank finds at its path: one of the words above, or a file's identity."""
    if not (dist.is_available() and dist.is_initialized()):
        return [_found(path, reads=True)]
    hosts: list[Any] = [None] * dist.get_world_size()
    found = list(hosts)
    with guarded("the look at the checkpoint"):
        dist.all_gather_object(hosts, socket.gethostname())
        # One rank of every node reads all of it; nodes may be called the same.
        is_first = hosts.index(socket.gethostname()) == dist.get_rank()
        reads = is_first or os.environ.get("LOCAL_RANK") == "0"
        dist.all_gather_object(found, _found(path, reads))
    return found


def _found(path: str, reads: bool) -> str:
    if os.path.isdir(path):
        return FOLDER
    if not os.path.isfile(path):
        return ELSEWHERE if PathManager.exists(path) else NOTHING
    return identity(path) if (is_whole if reads else has_an_end)(path) else TORN


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
