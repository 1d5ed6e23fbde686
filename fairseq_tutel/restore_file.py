"""The checkpoint that a training goes on from: which one, and whether it is there and whole."""

import glob
import logging
import os
from typing import Any

import torch.distributed as dist
from fairseq.file_io import PathManager

from fairseq_tutel.comm.guard import guarded
from fairseq_tutel.whole_files import has_an_end, is_whole

logger = logging.getLogger(__name__)


def checkpoint_to_load(cfg: Any) -> str | None:
    """Return the path of the checkpoint that a training will go on from, or None. Collective.

    Args:
        cfg: the checkpoint part of the FairseqConfig of a training.

    Raises:
        ValueError: it is not there, or on one of the nodes it is not whole; on all ranks alike.
    """
    suffix = f"{cfg.checkpoint_suffix or ''}.pt"
    last = os.path.join(cfg.save_dir, "checkpoint_last" + suffix)
    if cfg.restore_file != "checkpoint_last.pt":
        flag, path = "--restore-file", cfg.restore_file.replace(".pt", suffix)
        # Scripts that start a job again name the last checkpoint on the first start too.
        is_last = os.path.abspath(path) == os.path.abspath(last)
        if not is_last and not PathManager.exists(path):
            # Stock would train from scratch.
            raise ValueError(
                f"--restore-file is {path}, which does not exist; give a path from the current folder, or "
                "drop it to go on from --save-dir."
            )
    elif cfg.finetune_from_model is not None and not os.path.exists(last):
        flag, path = "--finetune-from-model", cfg.finetune_from_model
    else:
        flag, path = "--restore-file", last
    if os.path.isdir(path):
        raise ValueError(f"{flag} is {path}, a folder; name a checkpoint file in it.")
    if not os.path.isfile(path):
        _warn_of_checkpoints_beside(path)
        return None
    _refuse_torn(flag, path)
    return path


def _refuse_torn(flag: str, path: str) -> None:
    """Refuse a file that is not whole; one rank of every node reads all of it, and all hear of it."""
    reads = int(os.environ.get("LOCAL_RANK", 0)) == 0
    torn = [not (is_whole if reads else has_an_end)(path)]
    if dist.is_available() and dist.is_initialized():
        verdicts: list[Any] = [None] * dist.get_world_size()
        with guarded("the look at the checkpoint"):
            dist.all_gather_object(verdicts, torn[0])
        torn = verdicts
    if any(torn):
        others = _checkpoints_beside(path)
        such_as = f", such as --restore-file {others[0]}" if others else ""
        raise ValueError(
            f"{flag} is {path}, which is torn (cut off while it was written, or changed on its disk); "
            f"remove it and give an older checkpoint{such_as}."
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
