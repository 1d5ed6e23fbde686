"""Saves files atomically: after a crash, a full disk or an error, the old file is unchanged."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from fairseq_tutel.files import renamed_when_whole


def save(content: Any, path: str) -> None:
    """Write a local file atomically with torch.save; raise OSError if the file cannot be written."""
    with replacing(path) as temporary:
        write(content, temporary)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield the name of a temporary file to write to, and rename this file to `path` after the block.

    Raises:
        OSError: the file could not be written, and the temporary file was removed.
    """
    try:
        with renamed_when_whole(path) as temporary:
            yield temporary
    except Exception as error:
        raise unwritten(path, error) from error


@contextlib.contextmanager
def synced(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Open a file for writing in a `with` block, and call fsync at the end of the block."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(content: Any, path: str | os.PathLike, advance: Callable[[int], object] | None = None) -> None:
    """Write a file with torch.save, and flush it to disk with fsync.

    `advance` is called with the number of bytes of each write, and may raise an error to stop the writing.
    """
    with synced(path) as file:
        counted: Any = file if advance is None else _Counted(file, advance)
        torch.save(content, counted)


class _Counted:
    """A file object for torch.save that calls `advance` with the number of bytes of each write."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], object]) -> None:
        self._file, self._advance, self.flush = file, advance, file.flush

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._advance(count)
        return count


def unwritten(path: str, error: BaseException) -> OSError:
    """Return an OSError for a file that could not be written, with the reason and a fix in the message."""
    cause = system_error(error)
    message = (
        f"{path} could not be written: {reason_of(error)}; earlier checkpoints are unchanged; check the "
        "disk, and restart to resume from the newest checkpoint."
    )
    return OSError(message) if cause is None else OSError(cause.errno, message)


def unwritable(folder: str, error: BaseException) -> str:
    """Return the error message for a --save-dir in which no file can be written."""
    return (
        f"--save-dir is {folder}, in which no file can be written ({reason_of(error)}); give a writable "
        "folder on a disk with free space, also with --no-save."
    )


def reason_of(error: BaseException) -> str:
    """Return the message of the OSError that caused `error`; without an OSError, `error`'s first line."""
    cause = system_error(error)
    return str(error).partition("\n")[0] if cause is None else str(cause.strerror)


def system_error(error: BaseException) -> OSError | None:
    """Return the OSError that caused the exception `error`, or None if no OSError caused it."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    return cause
