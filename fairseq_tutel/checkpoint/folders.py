"""The folders of shards in --save-dir: begun under one name, committed under another, collected later.

SAVE_DIR/experts/writing-89abcdef is being written; SAVE_DIR/experts/0123456789abcdef is complete, and
named by its content. A folder counts from the moment that a checkpoint's file names it, so the rename of
that file is what commits a checkpoint. Between the two another process cannot tell it from one that nobody
needs any more, so what is younger than an hour is left alone, but by the process that knows whose it is.
"""

import hashlib
import logging
import os
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

PARENT, WRITING = "experts", "writing"
NAME = re.compile(r"[0-9a-f]{16}")
MENTION = re.compile(rb"experts/([0-9a-f]{16})")
YOUNG_SECONDS = 3600.0

# What this process committed, or saw a checkpoint name: once none does, nobody is about to.
_known: set[Path] = set()


def begin(save_dir: Path, prefix: str = WRITING) -> Path:
    """Return a new folder to write into, of a name that was never there: a client's cache may be old."""
    folder = save_dir / PARENT / f"{prefix}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return folder


def commit(written: Path, digests: Iterable[str]) -> str:
    """Give what was written its name, and return that from the checkpoint's folder on.

    Args:
        written: what `begin` returned.
        digests: a text for every piece that was written; they make the name.
    """
    name = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]
    folder = written.parent / name
    if folder.exists():  # saved before, for example at the end of an epoch without an update since
        for file in written.iterdir():
            os.replace(file, folder / file.name)  # which may be damaged there
        written.rmdir()
    else:
        os.utime(written)  # its age counts from here
        os.rename(written, folder)
    _known.add(folder.resolve())
    sync(folder)
    sync(folder.parent)
    return f"{PARENT}/{name}"


def sync(folder: Path) -> None:
    """Bring a folder's names down to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def collect(save_dir: Path) -> None:
    """Remove folders that no checkpoint in `save_dir` names, and what was cut off while it was written.

    A checkpoint may have any name. Where one can not be read, or the folders are elsewhere, behind a link,
    nothing is removed; nor is what is young and not known to this process.
    """
    parent = save_dir / PARENT
    if parent.is_symlink() or not parent.is_dir():
        return
    remove_cut_off(save_dir, YOUNG_SECONDS)
    folders = [f for f in parent.iterdir() if NAME.fullmatch(f.name) and not f.is_symlink()]
    if not folders:
        return
    files = [f for f in save_dir.iterdir() if f.is_file() and f.suffix != ".tmp"]
    try:
        named = set().union(*map(mentions, files))
    except Exception as error:  # of a damaged zip Python's reader raises whatever it stumbles over
        logger.warning(
            "kept all folders of %s, since a checkpoint can not be read: %s", parent, error
        )
        return
    for folder in folders:
        known = folder.resolve()
        if folder.name in named:
            _known.add(known)
        elif known in _known or _age(folder) >= YOUNG_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def remove_cut_off(save_dir: Path, seconds: float) -> None:
    """Remove what a training began to write and did not change for some time."""
    for folder in (save_dir / PARENT).glob(f"{WRITING}-*"):
        if _age(folder) >= seconds:
            shutil.rmtree(folder, ignore_errors=True)


def _age(folder: Path) -> float:
    """Return for how many seconds neither a folder nor a file in it was changed."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # changed just now
        return 0.0


# By file, times and size: the names do not change while the file does not.
_mentions: dict[tuple[int, ...], set[str]] = {}


def mentions(path: Path) -> set[str]:
    """Return the names of the folders that a checkpoint's file names; nothing in it is unpickled.

    Raises:
        ValueError: a file that is called .pt is none.
    """
    status = path.stat()
    key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    if key not in _mentions:
        _mentions[key] = _read_mentions(path)
    return _mentions[key]


def _read_mentions(path: Path) -> set[str]:
    with path.open("rb") as file:
        start = file.read(2)
    if start != b"PK":
        if path.suffix == ".pt" and start[:1] != b"\x80":  # a pickle, from before torch wrote zips
            raise ValueError(f"{path} is torn")
        return set()
    with zipfile.ZipFile(path) as archive:
        pickled = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return {name.decode() for text in pickled for name in MENTION.findall(text)}
