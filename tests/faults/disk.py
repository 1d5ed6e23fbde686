"""A disk of few bytes for a save dir: a small tmpfs, or where none may be mounted, a limit on files."""

import contextlib
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

LARGE = 64 << 20


@functools.cache
def can_mount() -> bool:
    """Whether this user may mount a tmpfs."""
    with tempfile.TemporaryDirectory() as folder:
        done = _mount(Path(folder), 1 << 16)
        if done:
            _unmount(Path(folder))
        return done


@contextlib.contextmanager
def small(folder: Path, num_bytes: int) -> Iterator[None]:
    """Let an empty folder be a disk of `num_bytes`, as long as the context lasts.

    Where `can_mount` is false it stays an ordinary folder: the training limits its files itself.
    """
    mounted = can_mount() and _mount(folder, num_bytes)
    try:
        yield
    finally:
        if mounted:
            _unmount(folder)


def make_room(folder: Path) -> None:
    """Let the disk be large."""
    if can_mount():
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", folder], check=True)


def _mount(folder: Path, num_bytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=True)
