"""Whole files: a checkpoint is written beside, renamed when whole, and looked at before it is read."""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

# As often as stock fairseq tries, and as long as it waits for a disk to come back.
TRIES, PAUSE_SECONDS = 3, 2.5
TEMPORARY = ".tmp"
# Linux' number of the call by which Btrfs, XFS and NFS 4.2 let a copy share the bytes of its source.
FICLONE = 0x40049409
DOS_FOLDER = 0x10
CHUNK = 2**20
# What may stand at a path in place of a checkpoint.
NOT_CHECKPOINTS = (FOLDER, PIPE, BROKEN_LINK, TORCH_SCRIPT) = (
    "a folder",
    "a pipe, device or socket",
    "a link that leads nowhere",
    "a TorchScript file",
)
TORN = "is torn (cut off while it was written, or changed on its disk)"


def temporary_of(path: str) -> str:
    """Return a name beside a file that no other writer has."""
    return f"{path}.{secrets.token_hex(4)}{TEMPORARY}"


def is_temporary(name: str) -> bool:
    """Whether a name is one of `temporary_of`."""
    return re.fullmatch(r".+\.[0-9a-f]{8}" + re.escape(TEMPORARY), name) is not None


def save(content: Any, path: str) -> None:
    """Write a file by torch.save under a temporary name, and rename it.

    Args:
        content: what torch.save takes.
        path: of a local file.

    Raises:
        OSError: in one sentence, which file could not be written and why; it is what it was before.
    """
    with replacing(path) as temporary:
        for left in reversed(range(TRIES)):
            try:
                write(content, temporary)
                return
            except Exception:
                if left == 0:
                    raise
                time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Give a temporary name to write to in the block; the file then gets that of `path`.

    Raises:
        OSError: in one sentence, which file could not be written and why; its bytes are free again.
    """
    temporary = temporary_of(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as error:
        raise unwritten(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def share(source: str, path: str) -> bool:
    """Copy a file by letting the copy share its bytes; False where the file system can not.

    A link would do so everywhere, but then who copies another file over checkpoint_last.pt, by hand or by a
    fairseq without this plugin, would rewrite the older checkpoint too.
    """
    with open(source, "rb") as read, open(path, "wb") as written:
        try:
            fcntl.ioctl(written, FICLONE, read.fileno())
        except OSError:
            return False
    return True


def write(content: Any, path: str | os.PathLike) -> None:
    """Write a file by torch.save and wait until the disk has it: what is then renamed is whole."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def unwritten(path: str, error: BaseException) -> OSError:
    """Return an error that says which file could not be written, why, and what to do."""
    cause, number, reason = system_error(error), None, str(error).partition("\n")[0]
    if cause is not None:
        number, reason = cause.errno, str(cause.strerror)
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    message = (
        f"{path} could not be written: {reason} ({free / 1e6:.1f} MB are free there); earlier checkpoints "
        "are as they were; see to the disk, and start again to go on from the newest."
    )
    return OSError(number, message) if number else OSError(message)


def system_error(error: BaseException) -> OSError | None:
    """Return the system's own error behind one of torch, which hides it; None where there is none."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, OSError) else None


def let_checkpoints_load(*classes: type) -> None:
    """Name the classes as safe that stock fairseq pickles beside tensors: torch.load refuses others.

    Encoder-decoder checkpoints hold a Namespace; those of a training with --eval-bleu hold meters of
    numpy numbers and arrays.

    Args:
        classes: of fairseq's own.
    """
    rebuilders: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    dtypes = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, np.ndarray, np.dtype, *rebuilders, *dtypes, *classes]
    )


def unlike_a_file(path: str | os.PathLike) -> str | None:
    """Return what stands at a path in place of a checkpoint; None for any other file, and for nothing."""
    if os.path.isfile(path):
        return TORCH_SCRIPT if _is_torch_script(path) else None
    if not os.path.lexists(path):
        return None
    if os.path.isdir(path):
        return FOLDER
    if os.path.exists(path):
        return PIPE
    return BROKEN_LINK


def is_pipe(path: str) -> bool:
    """Return whether a pipe, device or socket is at a path, which may never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # none is there, or no path has such a text
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_torch_script(path: str | os.PathLike) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False  # torn, or no archive


def refused_class(error: BaseException) -> str | None:
    """Return the class in a file that torch.load did not run; None where the error is another."""
    found = re.search(r"\bGLOBAL (\S+)", str(error))
    return found[1] if found else None


def is_whole(path: str) -> bool:
    """Whether a file is one that torch.save finished, bit for bit; reads all of it.

    torch.load itself compares no check sums. Of the format from before torch 1.6, which has none, only the
    beginning is looked at.
    """
    return _is_old(path) or _passes(path, _holds_what_was_written)


def has_an_end(path: str) -> bool:
    """Whether a file was not cut off, by its directory, which is its end; reads little."""
    return _is_old(path) or _passes(path, lambda archive: all(map(_is_plain, archive.infolist())))


def identity(path: str) -> str:
    """Return a text that is another one for a file of another content, but copies share; reads little.

    It is made of the names, sizes and check sums that stand in the file's directory. Of a file of the
    format from before torch 1.6, which has none, it is the size.
    """
    if _is_old(path):
        return str(os.path.getsize(path))
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _passes(path: str, test: Callable[[zipfile.ZipFile], bool]) -> bool:
    try:
        torch._C.PyTorchFileReader(path)  # refuses what Python's reader passes over
        with zipfile.ZipFile(path) as archive:
            return test(archive)
    except Exception:  # a name, a size or a flag is no longer what it was
        return False


def _holds_what_was_written(archive: zipfile.ZipFile) -> bool:
    entries = archive.infolist()
    if not all(map(_is_plain, entries)):
        return False
    for entry in entries:
        if entry.CRC:  # torch can be told to write none
            with archive.open(entry) as content:
                while content.read(CHUNK):
                    pass  # the reader compares at the end
    return True


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    # torch compresses nothing and writes no folders; its reader goes by the other of the two sizes.
    return entry.file_size == entry.compress_size and not entry.external_attr & DOS_FOLDER


def _is_old(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"  # a pickle
