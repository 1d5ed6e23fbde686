"""Checks and reads files that torch.save wrote, without running pickled code."""

import argparse
import errno
import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_tutel.checkpoint.atomic_save import system_error
from fairseq_tutel.files import printable
from fairseq_tutel.parallel.progress import progress

DOS_FOLDER = 0x10
CHUNK = 2**20
NOT_A_FILE = "a folder, pipe, device or broken link"
IS_CORRUPT = "is corrupt (truncated while it was written, or changed on disk)"
# Checkpoints of speech tasks contain objects of this class. The class is imported on demand, because
# importing fairseq takes seconds.
DICTIONARY = "fairseq.data.dictionary.Dictionary"
# The names of the checkpoint file to open in a folder such as --save-dir, in order of preference.
USUAL = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt")


def is_not_a_file(path: str | os.PathLike) -> bool:
    """Return whether a path exists but is no regular file. Reading from a pipe could block forever."""
    return os.path.lexists(path) and not os.path.isfile(path)


def checkpoint_in(path: Path, flag: str) -> Path:
    """Return `path` or, if `path` is a folder, the path of the first file of `USUAL` in the folder.

    Raises:
        ValueError: the folder has no checkpoint; the message contains `flag`.
    """
    if not path.is_dir():
        return path
    found = next((path / name for name in USUAL if (path / name).is_file()), None)
    if found is None:
        raise ValueError(
            f"{flag} names {path}, a folder without {' or '.join(USUAL)}; give a checkpoint file."
        )
    return found


def is_whole(path: str) -> bool:
    """Read a file that torch.save wrote, and return whether the bytes match the file's checksums.

    is_whole() compares checksums, because torch.load does not. A file from before torch 1.6 has no
    checksums, so only the file's first byte is checked.
    """
    return _is_old(path) or _passes(path, _matches_checksums)


def has_an_end(path: str) -> bool:
    """Return whether the central directory at the end of a zip file is intact; do not read the rest."""
    return _is_old(path) or _passes(path, lambda archive: True)


def identity(path: str) -> str:
    """Return a hash that identifies a checkpoint file, from names, sizes and checksums of its zip entries.

    Copies of a file have the same hash. For a file from before torch 1.6, the file size is returned.
    """
    if _is_old(path):
        return str(os.path.getsize(path))
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _is_old(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"


def _passes(path: str, test: Callable[[zipfile.ZipFile], bool]) -> bool:
    # open() is outside the try block, because a file that cannot be opened is not corrupt. torch gets an
    # open file, because torch cannot open a file whose name is not UTF-8.
    with open(path, "rb") as file:
        try:
            torch._C.PyTorchFileReader(file)  # torch checks more than zipfile does.
            with zipfile.ZipFile(file) as archive:
                return all(map(_is_plain, archive.infolist())) and test(archive)
        except Exception as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # Corrupt offsets give EINVAL or no errno.
            return False


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    # torch writes neither compressed entries nor folders.
    return entry.file_size == entry.compress_size and not entry.external_attr & DOS_FOLDER


def _matches_checksums(archive: zipfile.ZipFile) -> bool:
    entries = [entry for entry in archive.infolist() if entry.CRC]  # torch can save files without CRCs.
    name = printable(os.path.basename(archive.filename or ""))
    with progress(f"checking {name}", sum(entry.file_size for entry in entries), "B") as advance:
        for entry in entries:
            with archive.open(entry) as content:
                while chunk := content.read(CHUNK):  # The last read() of an entry compares the CRC.
                    advance(len(chunk))
    return True


def let_checkpoints_load(*classes: type) -> None:
    """Allow torch.load(weights_only=True) to load `classes` and the classes in fairseq's checkpoints.

    Encoder-decoder checkpoints contain a Namespace; meters of --eval-bleu contain numpy scalars and arrays.
    """
    rebuilders: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    dtypes = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, np.ndarray, np.dtype, *rebuilders, *dtypes, *classes]
    )


def mapped(path: str | os.PathLike) -> Any:
    """Load a file that torch.save wrote, without running pickled code.

    Tensors are memory-mapped if the path is UTF-8 and the file is a zip file. torch cannot map other files.
    """
    is_utf8 = os.fsencode(path).decode(errors="replace") == os.fspath(path)
    is_mapped = is_utf8 and zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)


def refused_class(error: BaseException) -> str | None:
    """Return the class name that torch.load rejected, or None if the error has another cause."""
    found = re.search(r"\bGLOBAL (\S+)", str(error))
    return found[1] if found else None


def read_file(path: Path, flag: str, verify: bool = True) -> Any:
    """Load the file at `path`, a value of the command-line flag `flag`; raise ValueError for a bad file.

    The tensors stay on disk until they are read. With `verify`, all checksums of the file are checked.
    Without `verify`, a converter could write corrupt weights to a new file with valid checksums.
    """
    let_checkpoints_load()
    if is_not_a_file(path):
        raise ValueError(f"{flag} names {path}, which is {NOT_A_FILE}; give a checkpoint file.")
    if not path.is_file():
        raise ValueError(f"{flag} names {path}, which does not exist; give an existing file.")
    fix = "remove this file, or give another" if flag == "INPUTS" else "give another file"
    # has_an_end() rejects compressed entries, which could expand without limit in an untrusted file.
    if zipfile.is_zipfile(path) and not has_an_end(str(path)):
        raise ValueError(f"{flag} names {path}, which is corrupt or not a checkpoint; {fix}.")
    try:
        content = _mapped_with_dictionary(path)
    except Exception as error:  # torch.load raises many error types.
        cause, refused = system_error(error), refused_class(error)
        reason = "is corrupt or not a checkpoint"
        if cause is not None:
            reason, fix = f"cannot be read ({cause.strerror})", f"make it readable, or {fix}"
        elif refused:
            reason += f" (it contains the class {refused}, which is not loaded)"
        raise ValueError(f"{flag} names {path}, which {reason}; {fix}.") from error
    if verify and not is_whole(str(path)):
        raise ValueError(f"{flag} names {path}, which {IS_CORRUPT}; {fix}.")
    return content


def _mapped_with_dictionary(path: Path) -> Any:
    try:
        return mapped(path)
    except Exception as error:
        if refused_class(error) != DICTIONARY or not find_spec("fairseq"):
            raise
    module, _, name = DICTIONARY.rpartition(".")
    let_checkpoints_load(getattr(import_module(module), name))
    return mapped(path)


def walk(tree: Any, opened: Callable[[Any], Any] = lambda node: node) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key, value) for every entry of nested dictionaries, lists and tuples.

    Each container is visited once, because a container from a file may contain itself. During the
    iteration, the caller may replace `container[key]` by another value. The function `opened` is called for
    every value, and can turn a value of another type into a container.
    """
    pending = [tree]
    visited: dict[int, Any] = {}  # This dict keeps containers alive, so no id is reused.
    while pending:
        node = opened(pending.pop())
        if not isinstance(node, dict | list | tuple) or id(node) in visited:
            continue
        visited[id(node)] = node
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key, value
            pending.append(value)
