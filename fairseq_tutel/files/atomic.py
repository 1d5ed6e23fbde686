"""Replaces files atomically: after a crash, either the old file or the complete new file exists."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator

TEMPORARY = ".tmp"


def temporary_of(path: str | os.PathLike) -> str:
    """Return an unused path for a temporary file in the same folder as `path`."""
    return f"{os.fspath(path)}.{secrets.token_hex(4)}{TEMPORARY}"


def is_temporary(name: str) -> bool:
    """Return whether a file name looks like that of a temporary file from `temporary_of`."""
    return re.fullmatch(r".+\.[0-9a-f]{8}" + re.escape(TEMPORARY), name) is not None


@contextlib.contextmanager
def temporary_beside(path: str | os.PathLike) -> Iterator[str]:
    """Yield a path for a temporary file in the same folder as `path`; remove the file after the block."""
    temporary = temporary_of(path)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


@contextlib.contextmanager
def renamed_when_whole(path: str | os.PathLike) -> Iterator[str]:
    """Yield a temporary path to write to; rename that file to `path` if the block succeeds."""
    with temporary_beside(path) as temporary:
        yield temporary
        os.replace(temporary, path)
