"""Files that a user gives: read whole; what is no ordinary one, as a pipe without a writer, is refused."""

import json
from pathlib import Path
from typing import Any


def content_of(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it is none, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no ordinary file")
    return path.read_bytes()


def json_of(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: as above.
        ValueError: it holds no JSON, or such as Python does not read.
    """
    try:
        return json.loads(content_of(path).decode("utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
