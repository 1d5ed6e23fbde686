"""Reads small untrusted files, and replaces files atomically.

Reading a file never blocks. The size of a file and the nesting of JSON are limited. After a crash during a
write, the file has either the old or the complete new content.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import Any

# The default limit of a file's size. The largest files are collective plans for many ranks.
LARGEST_BYTES = 2**28
# Maximum number of characters of a value in an error message.
SHOWN = 60
TEMPORARY = ".tmp"


def content_of(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> bytes:
    """Return a file's bytes. Raise OSError for a file that is too large, unreadable or not regular."""
    with open(path, "rb", opener=open_ordinary) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"the file has more than {largest:,} bytes")
    return content


def open_ordinary(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without blocking, and return its descriptor.

    Python's `open` accepts this function as `opener`. Raises OSError for a pipe, folder or device.
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
    """Load a small JSON file that may be untrusted; see `content_of` and `parse_json` for errors."""
    return parse_json(content_of(path))


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse a JSON text like `json.loads`, but also raise ValueError if the text nests too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except RecursionError as error:
        raise ValueError("the JSON nests too deeply") from error


def printable(text: str) -> str:
    """Escape the control characters of a text, so that printing the text cannot control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: Any) -> str:
    """Return a value as printable ASCII text of limited length, for an error message."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def error_line(error: BaseException | str) -> str:
    """Return an error as one line of text, which a command prints before it exits."""
    return f"error: {printable(str(error))}".replace("\n", "\\n")


def temporary_of(path: str | os.PathLike) -> str:
    """Return an unused path for a temporary file in the same folder as `path`."""
    return f"{os.fspath(path)}.{secrets.token_hex(4)}{TEMPORARY}"


def is_temporary(name: str) -> bool:
    """Return whether `temporary_of` could have made this file name."""
    return re.fullmatch(r".+\.[0-9a-f]{8}" + re.escape(TEMPORARY), name) is not None


@contextlib.contextmanager
def renamed_when_whole(path: str | os.PathLike) -> Iterator[str]:
    """Yield a temporary path to write to. If the block succeeds, rename the temporary file to `path`."""
    temporary = temporary_of(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
