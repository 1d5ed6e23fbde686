"""Checkpoint files as the tools have them: opened without a copy, written whole or not at all."""

import contextlib
import errno
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint import files as whole_files
from fairseq_tutel.checkpoint.files import (
    TORN,
    has_an_end,
    is_whole,
    let_checkpoints_load,
    refused_class,
    system_error,
)
from fairseq_tutel.checkpoint.malformed import refuse_weights
from fairseq_tutel.checkpoint.shards import bind, unbind
from fairseq_tutel.tools.arguments import temporary

# Where fairseq begins in the data, and how it says so.
START = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
# What checkpoints of speech tasks hold; fairseq takes seconds to import, and others need it not.
DICTIONARY = "fairseq.data.dictionary.Dictionary"
FULL = (errno.ENOSPC, errno.EDQUOT)


def load(path: Path, flag: str) -> dict[str, Any]:
    """Open a fairseq checkpoint; its tensors stay in the file until they are read, but those in shards.

    Raises:
        ValueError: the file, or a shard, is missing or torn, or it is no fairseq checkpoint.
    """
    state = load_lazily(path, flag)
    unbind(state)
    return state


def load_lazily(path: Path, flag: str) -> dict[str, Any]:
    """Open a fairseq checkpoint like `load`, but leave tensors that are in shards there, too."""
    state = load_any(path, flag)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{flag} names {path}, which holds no model; give checkpoints of fairseq.")
    refuse_weights(state["model"], f"{flag} {path}")
    bind(state, path)
    return state


def load_any(path: Path, flag: str, only_look: bool = False) -> Any:
    """Open what torch.save wrote; its tensors stay in the file until they are read, or in shards.

    No pickled code runs: classes that are not on torch's list, or on ours, are refused. A file whose
    bytes are not what was saved is refused too, or what is made of it would be valid.

    Args:
        path: of the file.
        flag: of the command line that names it.
        only_look: make nothing of it: the bytes are not read.

    Raises:
        ValueError: the file is missing, torn or of another kind.
    """
    let_checkpoints_load()
    if not path.is_file():
        raise ValueError(f"{flag} names {path}, which {_unlike_a_file(path)}.")
    fix = "leave it out, or give another" if flag == "--inputs" else "give another file"
    # A compressed entry may grow without end.
    if zipfile.is_zipfile(path) and not has_an_end(str(path)):
        raise ValueError(f"{flag} names {path}, which is torn or no checkpoint; {fix}.")
    try:
        content = _loaded(path)
    except Exception as error:  # torch has no exception of its own for what it can not read
        cause = system_error(error)
        if cause is not None:  # the disk's, or of a permission
            reason = f"which cannot be read ({cause.strerror}); see to that, or {fix}"
            raise ValueError(f"{flag} names {path}, {reason}.") from error
        refused = refused_class(error)
        holds = f" (it holds {refused}, which is not run)" if refused else ""
        raise ValueError(
            f"{flag} names {path}, which is torn or no checkpoint{holds}; {fix}."
        ) from error
    if not only_look and not is_whole(str(path)):
        raise ValueError(f"{flag} names {path}, which {TORN}; {fix}.")
    return content


def _loaded(path: Path) -> Any:
    def load() -> Any:
        return torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
        )

    try:
        return load()
    except Exception as error:
        if refused_class(error) != DICTIONARY or not find_spec("fairseq"):
            raise
    from fairseq.data import Dictionary

    let_checkpoints_load(Dictionary)
    return load()


def _unlike_a_file(path: Path) -> str:
    if path.is_dir():
        return "is a folder; give a file in it"
    return "is no ordinary file; give one" if path.exists() else "does not exist"


def write(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint under a temporary name and rename it: the file is whole or what it was.

    Raises:
        ValueError: it could not be written, for example on a full disk.
    """
    write_all([(path, state)])


def write_all(files: Iterable[tuple[Path, Any]]) -> None:
    """Write files under temporary names, one after the other, and rename them when all are whole.

    Raises:
        ValueError: one could not be written, for example on a full disk.
    """
    written: list[Path] = []
    try:
        for path, state in files:
            written.append(path)
            whole_files.write(state, temporary(path))
        for path in written:
            os.replace(temporary(path), path)
    except (OSError, RuntimeError) as error:
        raise not_written(written[-1], error) from error
    finally:
        for path in written:
            with contextlib.suppress(OSError):  # it is gone, or the disk is one to read from alone
                temporary(path).unlink()


def not_written(output: Path, error: Exception) -> ValueError:
    """Return an error that says by the system's words why a file was not written, and what to do."""
    cause = system_error(error)
    # The writer of safetensors says the number within a sentence.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = cause.errno if cause is not None else int(found[1]) if found else None
    reason = os.strerror(number) if number else str(error).partition("\n")[0]
    fix = "make room, or give another place" if number in FULL else "give another place"
    return ValueError(f"--output {output} could not be written ({reason}); {fix}.")


def begun_anew(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with which a training begins anew, as by fairseq's --finetune-from-model.

    Without optimizer state, meters, and place in the data; the history stays, which fairseq asks for.
    """
    kept = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    nothing = {
        "criterion_name": "",
        "optimizer_name": "",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        **kept,
        "optimizer_history": state.get("optimizer_history") or [nothing],
        "extra_state": {"train_iterator": dict(START)},
    }
