"""Keeps an unfinished output folder, so that the same command continues after an interruption.

OUTPUT.unfinished becomes OUTPUT when it is complete. Until then it has a journal: a key that identifies the
input and the options, and an entry for each finished step. The folder of experts stays between runs; all
other files are written again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.saved import not_written
from fairseq_tutel.convert.safetensors_folder import put
from fairseq_tutel.files import content_of, is_temporary, parse_json, renamed_when_whole

SUFFIX, JOURNAL = ".unfinished", "journal.jsonl"


class Unfinished:
    """An output folder that is being written, and the journal of its finished steps.

    The first line of the journal is the key. Each further line is a step and its result.
    """

    def __init__(self, folder: Path, key: str, journal: dict[str, Any], log: Callable[[str], None]) -> None:
        self.folder, self.journal, self.log = folder, journal, log
        with renamed_when_whole(folder / JOURNAL) as path, open(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in (key, *journal.items()))

    def record(self, step: str, result: Any) -> None:
        """Add a finished step and its result to the journal, on disk too. `result` must fit into JSON."""
        self.journal[step] = result
        with open(self.folder / JOURNAL, "a") as file:
            file.write(json.dumps([step, result]) + "\n")
            file.flush()
            os.fsync(file.fileno())


def key_of(facts: Any) -> str:
    """Return a hash of facts that identify an input and the options; `facts` must fit into JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def finishing(output: Path, key: str, log: Callable[[str], None]) -> Iterator[Unfinished]:
    """Yield the unfinished folder of `output`; rename it to `output` if the block succeeds.

    If an earlier run with the same key was interrupted, its journal is read. Work of another key is
    deleted. If `output` exists, the finished folder replaces it.

    Raises:
        ValueError: the folder cannot be written, is in use, or was not made by this function.
    """
    folder = output.with_name(output.name + SUFFIX)
    try:
        with _opened(folder, key, log) as work:
            yield work
            folders.sync(folder)
            put(folder, output)
            os.remove(output / JOURNAL)
    except OSError as error:
        raise not_written(output, error, "free disk space and run the command again to continue") from error


@contextlib.contextmanager
def _opened(folder: Path, key: str, log: Callable[[str], None]) -> Iterator[Unfinished]:
    found = _journal(folder) if folder.exists() else []
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        kept = [JOURNAL]
        if found and found[0] == key:
            log(f"continuing the work in {folder}")
            kept.append(folders.PARENT)
        elif found:
            log(f"the input or the options changed, so the work in {folder} starts anew")
            found = []
        for entry in folder.iterdir():
            if entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield Unfinished(folder, key, dict(found[1:]), log)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the lock ends with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another process writes to {folder}; wait for its end, or give another --output."
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _journal(folder: Path) -> list[Any]:
    """Return the lines of a folder's journal; [] for an empty folder.

    Raises:
        ValueError: the journal is missing or corrupt.
    """
    try:
        if all(is_temporary(entry.name) for entry in folder.iterdir()):
            return []
        # A line without an end was cut off.
        lines = content_of(folder / JOURNAL).decode().split("\n")[:-1]
        key, *steps = map(parse_json, lines)
        if not isinstance(key, str) or not all(isinstance(s, list) and len(s) == 2 for s in steps):
            raise ValueError("it has other lines")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is the place of unfinished work, but its {JOURNAL} cannot be read ({error}); remove "
            "the folder, or give another --output."
        ) from error
    return [key, *steps]
