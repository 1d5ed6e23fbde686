"""Small files from anybody: the one reader, which never waits and limits size and depth."""

import json
import os
import stat
from typing import Any

# Plans of many ranks are the largest of these files.
LARGEST_BYTES = 2**28


def content_of(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it is no regular file, is too large or cannot be read.
    """
    return content_and_time(path, largest)[0]


def content_and_time(path: str | os.PathLike, largest: int = LARGEST_BYTES) -> tuple[bytes, float]:
    """Return a file's bytes and the time of its last change, in seconds.

    Raises:
        OSError: as above.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError("it is no ordinary file")
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"it has more than {largest:,} bytes")
    return content, facts.st_mtime


def _open_at_once(path: str, flags: int) -> int:
    # Without O_NONBLOCK a pipe would wait here for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def json_of(path: str | os.PathLike) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: as above.
        ValueError: it holds no JSON, or nests too deeply.
    """
    return parse_json(content_of(path))


def parse_json(text: bytes | bytearray, **options: Any) -> Any:
    """Return what a JSON text holds; `options` are those of `json.loads`.

    Raises:
        ValueError: as above.
    """
    try:
        return json.loads(text.decode("utf-8"), **options)
    except RecursionError as error:
        raise ValueError("its JSON nests too deeply") from error


def printable(text: str) -> str:
    """Return a text with its control characters escaped, so that no file can command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
