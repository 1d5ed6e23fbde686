"""Reads small untrusted files without blocking, and limits their size and the nesting of JSON."""

import errno
import json
import os
import stat
from typing import Any

# The largest of these files are collective plans for many ranks.
LARGEST_BYTES = 2**28
# Maximum number of characters of a value in an error message.
SHOWN = 60


def content_of(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> bytes:
    """Return a file's bytes. Raise OSError if the file is too large, unreadable or not a regular file."""
    with open(path, "rb", opener=open_ordinary) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"the file has more than {largest:,} bytes")
    return content


def open_ordinary(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without blocking; return its descriptor. Use this as the `opener` of `open`.

    Raises OSError for a pipe, folder or device.
    """
    # Without O_NONBLOCK, opening a pipe would block until another process writes to it.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError("the path is not a regular file")


def json_of(path: str | os.PathLike) -> Any:
    """Load a small JSON file that may be untrusted. `content_of` and `parse_json` list the errors."""
    return parse_json(content_of(path))


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse a JSON text like `json.loads`; raise ValueError also if the text nests too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except RecursionError as error:
        raise ValueError("the JSON nests too deeply") from error


def printable(text: str) -> str:
    """Escape the control characters of a text, so that it cannot control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: Any) -> str:
    """Return a value as printable ASCII text of limited length, for an error message."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def error_line(error: BaseException | str) -> str:
    """Return an error as one line of text, which a command prints before it exits."""
    return f"error: {printable(str(error))}".replace("\n", "\\n")
