"""Checkpoint files as the tools have them: opened without a copy, written whole or not at all."""

import argparse
import contextlib
import errno
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint import files as whole_files
from fairseq_tutel.checkpoint.files import TEMPORARY, TORN, is_whole, refused_class, system_error
from fairseq_tutel.checkpoint.shards import bind, unbind

FULL = (errno.ENOSPC, errno.EDQUOT)


def load(path: Path, flag: str) -> dict[str, Any]:
    """Open a fairseq checkpoint; its tensors stay in the file until they are read, but those in shards.

    Args:
        path: of the file.
        flag: of the command line that names it.

    Raises:
        ValueError: the file is missing, torn or no fairseq checkpoint, or its shards are.
    """
    state = load_lazily(path, flag)
    unbind(state)
    return state


def load_lazily(path: Path, flag: str) -> dict[str, Any]:
    """Open a fairseq checkpoint; its tensors stay in the file, or in shards, until they are read.

    Args:
        path: of the file.
        flag: of the command line that names it.

    Raises:
        ValueError: the file is missing, torn or no fairseq checkpoint, or its shards are missing.
    """
    state = load_any(path, flag)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{flag} names {path}, which holds no model; give checkpoints of fairseq.")
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
    if not path.is_file():
        raise ValueError(f"{flag} names {path}, which {_unlike_a_file(path)}.")
    fix = "leave it out, or give another" if flag == "--inputs" else "give another file"
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
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
            whole_files.write(state, _temporary(path))
        for path in written:
            os.replace(_temporary(path), path)
    except (OSError, RuntimeError) as error:
        raise not_written(written[-1], error) from error
    finally:
        for path in written:
            with contextlib.suppress(OSError):  # it is gone, or the disk is one to read from alone
                _temporary(path).unlink()


def not_written(output: Path, error: Exception) -> ValueError:
    """Return an error that says by the system's words why a file was not written, and what to do."""
    cause = system_error(error)
    # The writer of safetensors says the number within a sentence.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = cause.errno if cause is not None else int(found[1]) if found else None
    reason = os.strerror(number) if number else str(error).partition("\n")[0]
    fix = "make room, or give another place" if number in FULL else "give another place"
    return ValueError(f"--output {output} could not be written ({reason}); {fix}.")


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option without which no file is replaced."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what --output names, if it is there"
    )


def output_path(text: str) -> Path:
    """Return --output as a path.

    Raises:
        ValueError: it is written as a folder.
    """
    if text.endswith("/"):
        raise ValueError(f"--output is {text}; give the name of a file, without / at its end.")
    return Path(text)


def refuse_output(output: Path, inputs: list[Path], overwrite: bool) -> None:
    """Refuse an output that can not be written, or that would be lost by it, before any work.

    Args:
        output: the file to write.
        inputs: none of which is replaced, whatever the user says.
        overwrite: whether another file may be.

    Raises:
        ValueError: naming the output and the fix.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output is {output}; give the name of a file in an existing folder.")
    if output.exists() and not output.is_file():  # a device, which a rename would replace
        raise ValueError(f"--output is {output}, which is no ordinary file; give another name.")
    for path in inputs:
        for target in (output, _temporary(output)):
            if target.exists() and path.exists() and target.samefile(path):
                raise ValueError(
                    f"--output is {output}, which would overwrite the input {path}; give another name."
                )
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output} exists; give another name, or add --overwrite.")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)
