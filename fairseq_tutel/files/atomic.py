"""Replaces files atomically: a crash leaves the old file, and never a part of the new one."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator

TEMPORARY = ".tmp"


def temporary_of(path: str | os.PathLike) -> str:
    """Return an unused name in the folder of a file."""
    return f"{os.fspath(path)}.{secrets.token_hex(4)}{TEMPORARY}"


def is_temporary(name: str) -> bool:
    """Whether a name is one of `temporary_of`."""
    return re.fullmatch(r".+\.[0-9a-f]{8}" + re.escape(TEMPORARY), name) is not None


@contextlib.contextmanager
def temporary_beside(path: str | os.PathLike) -> Iterator[str]:
    """Yield an unused name in the folder of a file, and remove a file of that name after the block."""
    temporary = temporary_of(path)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


@contextlib.contextmanager
def renamed_when_whole(path: str | os.PathLike) -> Iterator[str]:
    """Yield a temporary name to write to, and rename that file to `path` after the block."""
    with temporary_beside(path) as temporary:
        yield temporary
        os.replace(temporary, path)
