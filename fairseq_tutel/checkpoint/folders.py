"""Creates, commits and deletes the folders of shard files in --save-dir.

An incomplete folder is named SAVE_DIR/experts/writing-89abcdef. A complete folder is named
SAVE_DIR/experts/0123456789abcdef, where the number is a hash of the content. The checkpoint file that names
a folder is written after the folder. Until then, other processes cannot detect that the folder is needed.
Therefore, they delete no folder that is less than one hour old.
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

# Expert folders that this process committed or found in a checkpoint. These folders are deleted as soon as
# no checkpoint names them.
_known: set[Path] = set()


def begin(save_dir: Path, prefix: str = WRITING) -> Path:
    """Create a folder with a random name for shard files that are being written.

    The folder name is never reused, because a network file system may have cached an older folder.
    """
    folder = save_dir / PARENT / f"{prefix}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return folder


def commit(written: Path, digests: Iterable[str]) -> str:
    """Rename a complete folder to a hash of `digests`; return the new path relative to the checkpoint."""
    name = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]
    folder = written.parent / name
    if folder.exists():  # An earlier save wrote the same folder.
        for file in written.iterdir():
            os.replace(file, folder / file.name)  # The older shard file may be damaged.
        written.rmdir()
    else:
        os.utime(written)  # utime sets the age of the folder to 0.
        os.rename(written, folder)
    _known.add(folder.resolve())
    sync(folder)
    sync(folder.parent)
    return f"{PARENT}/{name}"


def sync(folder: Path) -> None:
    """Call fsync on a folder, so new and renamed files in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def collect(save_dir: Path) -> None:
    """Delete expert folders that are old and incomplete, or that no checkpoint in `save_dir` names.

    All files are read, because a checkpoint may have any name. If a checkpoint is unreadable, only
    incomplete folders are deleted. If `experts` is a symbolic link, nothing is deleted. A complete
    folder less than one hour old is deleted only if this process wrote it, or read its name in a file.
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
    except Exception as error:  # zipfile raises many error types for a damaged file.
        logger.warning("kept all folders in %s because a checkpoint cannot be read: %s", parent, error)
        return
    for folder in folders:
        known = folder.resolve()
        if folder.name in named:
            _known.add(known)
        elif known in _known or _age(folder) >= YOUNG_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def remove_cut_off(save_dir: Path, seconds: float) -> None:
    """Delete incomplete expert folders that have not changed for `seconds` seconds."""
    for folder in (save_dir / PARENT).glob(f"{WRITING}-*"):
        if _age(folder) >= seconds:
            shutil.rmtree(folder, ignore_errors=True)


def _age(folder: Path) -> float:
    """Return the number of seconds since the last change of a folder or of its files."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        return 0.0


def mentions(path: Path) -> set[str]:
    """Return the names of expert folders in a checkpoint; raise an error for a corrupt file."""
    with path.open("rb") as file:
        start = file.read(2)
    if start != b"PK":
        if path.suffix == ".pt" and start[:1] != b"\x80":  # "\x80" begins a pickle.
            raise ValueError(f"{path} is corrupt: its first bytes are not those of a checkpoint")
        return set()
    with zipfile.ZipFile(path) as archive:
        pickled = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return {name.decode() for text in pickled for name in MENTION.findall(text)}
