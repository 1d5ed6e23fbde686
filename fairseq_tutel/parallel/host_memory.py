"""Reads how much host memory is available on this machine or in this container."""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available(root: Path = Path("/")) -> int | None:
    """Return the least of MemAvailable and the available bytes of each cgroup that limits this process.

    A cgroup's available bytes are its limit, minus its usage, plus its inactive page cache. `root` is the
    folder that contains proc and sys/fs/cgroup. The result is None if the system has no MemAvailable.
    """
    of_machine = _value_of(root / "proc/meminfo", "MemAvailable:")
    if of_machine is None:
        return None
    return max(0, min([of_machine * 1024, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield the available bytes of this process's cgroup and of each of its parent cgroups."""
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return
    path = next((line[3:] for line in text.splitlines() if line.startswith("0::")), "")  # version 2
    inner = PurePosixPath(path.lstrip("/"))
    # Inside a container, sys/fs/cgroup itself may be the folder of this process's cgroup.
    for part in (inner, *inner.parents):
        folder = root / "sys/fs/cgroup" / part
        with contextlib.suppress(OSError, ValueError):  # The folder is missing, or the limit is "max".
            left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
            # The kernel frees the inactive page cache before it refuses memory.
            yield left + (_value_of(folder / "memory.stat", "inactive_file") or 0)


def _value_of(path: Path, key: str) -> int | None:
    """Return the number after a key in a file with one key and number per line, or None without the key."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == key:
                return int(words[1])
    return None
