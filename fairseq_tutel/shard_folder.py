"""The folders of shards in --save-dir: begun under one name, committed under another, collected later.

SAVE_DIR/experts/writing is being written; SAVE_DIR/experts/0123456789abcdef is complete, and named by its
content. A folder counts from the moment that a checkpoint's file names it, so the rename of that file is
what commits a checkpoint.
"""

import hashlib
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

PARENT = "experts"
NAME = re.compile(r"[0-9a-f]{16}")
MENTION = re.compile(rb"experts/([0-9a-f]{16})")


def begin(save_dir: Path) -> Path:
    """Return an empty folder to write into."""
    folder = writing(save_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def writing(save_dir: Path) -> Path:
    """Return the folder that is being written."""
    return save_dir / PARENT / "writing"


def commit(save_dir: Path, digests: Iterable[str]) -> str:
    """Give what was written its name, and return that from `save_dir` on.

    Args:
        save_dir: as in `begin`.
        digests: a text for every piece that was written; they make the name.
    """
    name = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]
    folder = save_dir / PARENT / name
    if folder.exists():  # saved before, for example at the end of an epoch without an update since
        shutil.rmtree(writing(save_dir))
    else:
        os.rename(writing(save_dir), folder)
    _sync(folder)
    _sync(folder.parent)
    return f"{PARENT}/{name}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def collect(save_dir: Path) -> None:
    """Remove the folders of shards that no checkpoint in `save_dir` names.

    Where a checkpoint can not be read, nothing is removed.
    """
    folders = [f for f in (save_dir / PARENT).glob("*") if f.is_dir() and NAME.fullmatch(f.name)]
    if not folders:
        return
    try:
        named = set().union(*(mentions(path) for path in save_dir.glob("*.pt")))
    except (OSError, zipfile.BadZipFile) as error:
        logger.warning("kept all folders of %s, since %s", save_dir / PARENT, error)
        return
    for folder in folders:
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


# By path, time and size: the names do not change while the file does not.
_mentions: dict[tuple[Path, int, int], set[str]] = {}


def mentions(path: Path) -> set[str]:
    """Return the names of the folders that a checkpoint's file names; nothing in it is unpickled."""
    status = path.stat()
    key = (path, status.st_mtime_ns, status.st_size)
    if key not in _mentions:
        _mentions[key] = _read_mentions(path)
    return _mentions[key]


def _read_mentions(path: Path) -> set[str]:
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return set()  # older than shards
    with zipfile.ZipFile(path) as archive:
        pickled = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return {name.decode() for text in pickled for name in MENTION.findall(text)}
