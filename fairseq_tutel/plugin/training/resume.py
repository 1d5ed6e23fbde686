"""Chooses the checkpoint from which training resumes, and checks it on all ranks."""

import glob
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from fairseq.file_io import PathManager

from fairseq_tutel.checkpoint import files
from fairseq_tutel.checkpoint.files import NOT_A_FILE, mapped
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import name_ranks
from fairseq_tutel.parallel.world import run_on_rank_zero

logger = logging.getLogger(__name__)

# Results of a rank without a readable checkpoint: no file, a corrupt file, or a remote file.
NOTHING, CORRUPT, ELSEWHERE = "nothing", "corrupt", "no local file"
KINDS = (NOTHING, CORRUPT, ELSEWHERE, NOT_A_FILE)
CHECK = "the check of the checkpoint"  # Error messages of the check's collectives contain this text.
# Names of checkpoints that a run saves in addition to checkpoint_last.pt.
SAVED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")


def check_checkpoint(cfg: Any) -> None:
    """Check on all ranks the checkpoint from which training will resume, if there is one. Collective.

    The file checkpoint_last.pt may be missing, for example because the disk was full at the first save. In
    this case, the newest complete checkpoint is used: its path is stored in `cfg`, the section `checkpoint`
    of a FairseqConfig.
    """
    newest = run_on_rank_zero(lambda: _newest_saved(cfg), "rank 0's search for a checkpoint")
    if newest is not None:
        path = os.path.join(cfg.save_dir, newest)
        cfg.restore_file, cfg.continue_once, cfg.finetune_from_model = path, None, None
    flag, path = flag_and_path(cfg)
    mine = _found(path), socket.gethostname()
    of_ranks = world.all_gather_object(mine, CHECK)
    found = [identity for identity, _ in of_ranks]
    # Only one rank of each machine reads the complete file.
    reads = mine[0] not in KINDS and of_ranks.index(mine) == world.rank()
    if CORRUPT in found or not all(world.all_gather_object(not reads or files.is_whole(path), CHECK)):
        others = set(glob.glob(os.path.join(os.path.dirname(path), "checkpoint*.pt"))) - {path}
        such_as = f", such as --restore-file {max(others, key=os.path.getmtime)}" if others else ""
        raise ValueError(
            f"{flag} is {path}, which {files.IS_CORRUPT}; remove it and give an older checkpoint{such_as}."
        )
    if any(other != found[0] for other in found):
        ranks = name_ranks([rank for rank, other in enumerate(found) if other != found[0]])
        what = "does not exist" if found[0] == NOTHING else "is a checkpoint"
        raise ValueError(
            f"{flag} is {path}, which {what} on rank 0, but {ranks} found something else; give a file or "
            "--save-dir that all ranks share, or copy rank 0's file to the same path on every node."
        )
    if found[0] == NOT_A_FILE:
        raise ValueError(f"{flag} is {path}, which is {found[0]}; give a checkpoint file.")
    # Scripts that restart jobs name checkpoint_last.pt even at the first start, when it is missing.
    if found[0] == NOTHING and os.path.abspath(path) != os.path.abspath(_last(cfg)):
        # fairseq would train from scratch if the checkpoint file is missing.
        raise ValueError(
            f"{flag} is {path}, which does not exist; give an existing file (relative to the current "
            f"folder), or remove {flag}."
        )


def flag_and_path(cfg: Any) -> tuple[str, str]:
    """Return the flag that names the checkpoint that fairseq loads first, and the checkpoint's path."""
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
    """If checkpoint_last.pt is missing, return the newest complete checkpoint in --save-dir, else None."""
    begin, path, last = cfg.continue_once or cfg.finetune_from_model, _restored(cfg), _last(cfg)
    is_given = os.path.abspath(path) != os.path.abspath(last)
    is_there = PathManager.exists(last) or os.path.lexists(last)
    folder = os.path.abspath(cfg.save_dir)
    begins_here = begin and os.path.dirname(os.path.abspath(begin)) == folder
    if cfg.checkpoint_suffix or is_given or is_there or begins_here or not os.path.isdir(folder):
        return None
    others = [os.path.join(folder, name) for name in os.listdir(folder) if SAVED.fullmatch(name)]
    for updates, newest in sorted(((_updates_of(path), path) for path in others), reverse=True):
        if updates >= 0 and files.is_whole(newest):
            logger.warning(
                "there is no %s, so training resumes from %s (update %d), the newest complete checkpoint; "
                "give another --save-dir to start from scratch",
                *(last, os.path.basename(newest), updates),
            )
            return os.path.basename(newest)
    if others:
        raise ValueError(
            f"--save-dir is {cfg.save_dir}, which has no checkpoint_last.pt, and its {len(others)} other "
            "checkpoints are corrupt; give another --save-dir to start from scratch, or --restore-file "
            "with a checkpoint from another folder."
        )
    return None


def _updates_of(path: str) -> int:
    """Return a checkpoint's number of updates, or -1 if the file is corrupt or shard files are missing."""
    if not os.path.isfile(path):
        return -1  # Opening a pipe would block.
    try:
        state = mapped(path)
        bind(state, Path(path))
        return int(state["optimizer_history"][-1]["num_updates"])
    except Exception:  # For an unreadable file, torch raises many kinds of errors.
        return -1


def _found(path: str) -> str:
    """Return the identity of a checkpoint file, or one of `KINDS` if it cannot be read."""
    if files.is_not_a_file(path):
        return NOT_A_FILE
    if not os.path.isfile(path):
        return ELSEWHERE if PathManager.exists(path) else NOTHING
    return files.identity(path) if files.has_an_end(path) else CORRUPT
