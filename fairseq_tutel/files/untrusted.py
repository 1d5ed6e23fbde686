"""Reads small untrusted files: never waits, and limits their size and depth."""

import errno
import json
import os
import stat
from typing import Any

# Plans of many ranks are the largest of these files.
LARGEST_BYTES = 2**28
# Characters of a value that an error message quotes.
SHOWN = 60


def content_of(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> bytes:
    """Return a file's bytes; a file that is not regular, too large or unreadable is an OSError."""
    return content_and_time(path, largest)[0]


def content_and_time(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> tuple[bytes, float]:
    """Return a file's bytes as `content_of`, and the time of its last change, in seconds."""
    with open(path, "rb", opener=open_ordinary) as file:
        content = file.read(largest + 1)
        changed = os.fstat(file.fileno()).st_mtime
    if len(content) > largest:
        raise OSError(f"it has more than {largest:,} bytes")
    return content, changed


def open_ordinary(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file, as an `opener` of `open`; a pipe, folder or device is an OSError."""
    # Without O_NONBLOCK a pipe would wait here for a writer.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError("it is not an ordinary file")


def json_of(path: str | os.PathLike) -> Any:
    """Return what a JSON file holds; raise as `content_of` and `parse_json`."""
    return parse_json(content_of(path))


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Return what a JSON text holds, as `json.loads`; text that nests too deeply is a ValueError, too."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except RecursionError as error:
        raise ValueError("its JSON nests too deeply") from error


def printable(text: str) -> str:
    """Return a text with its control characters escaped, so that no file can command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: Any) -> str:
    """Return a value as printable ASCII of limited length, for an error message."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def error_line(error: BaseException | str) -> str:
    """Return the one line that a command ends with on an error."""
    return f"error: {printable(str(error))}".replace("\n", "\\n")
