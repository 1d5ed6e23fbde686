"""Reads how much host memory is available on this machine, or in this container."""

import contextlib
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fairseq_tutel.parallel import world

GIB = 2**30


class _CgroupFiles(NamedTuple):
    folder: str
    limit: str
    usage: str
    inactive: str  # key in memory.stat: page cache that the kernel frees first


_VERSION_1 = _CgroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _CgroupFiles("", "memory.max", "memory.current", "inactive_file")


def available(root: Path = Path("/")) -> int | None:
    """Return the smaller of MemAvailable and what the memory limits of the process's cgroups leave.

    What a limit leaves is the limit, minus the usage of the cgroup, plus its inactive page cache. `root` is
    the root of the file system, in which /proc and /sys/fs/cgroup are read. None if the system has no
    MemAvailable.
    """
    of_machine = _value_of(root / "proc/meminfo", "MemAvailable:")
    if of_machine is None:
        return None
    return max(0, min([of_machine * 1024, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit of this process's cgroups leaves."""
    text = ""
    with contextlib.suppress(OSError):
        text = (root / "proc/self/cgroup").read_text()
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        top = root / "sys/fs/cgroup" / files.folder
        # Inside a container, the folder may be mounted at the top; then only the top exists.
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            left = _left_in(top / part, files)
            if left is not None:
                yield left


def _left_in(folder: Path, files: _CgroupFiles) -> int | None:
    """Return the bytes that the limit of one cgroup leaves; None if it has no limit or no such files."""
    try:
        limit = (folder / files.limit).read_text().strip()
        usage = (folder / files.usage).read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    return int(limit) - int(usage) + (_value_of(folder / "memory.stat", files.inactive) or 0)


def _value_of(path: Path, key: str) -> int | None:
    """Return the number after a key in a file with a key and a number per line; None if it is missing."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == key:
                return int(words[1])
    return None


def refuse_too_little(num_bytes: int, flag: str, instead: str = "") -> int:
    """Raise ValueError on all ranks if the ranks of any machine need more memory than it has. Collective.

    `num_bytes` is what this rank needs for the option `flag`. `instead` is an option that needs less; by
    default, the message says to remove `flag`. Returns the bytes that all ranks need.
    """
    mine = socket.gethostname(), num_bytes, available()
    needed: dict[str, int] = defaultdict(int)
    left: dict[str, int] = {}
    for host, size, free in world.all_gather_object(mine, "the check of host memory"):
        needed[host] += size
        if free is not None:
            left[host] = min(free, left.get(host, free))
    for host, size in needed.items():
        if host in left and size > left[host]:
            raise ValueError(
                f"{flag} is set, which needs {size / GIB:.2f} GiB of host memory on {host} for copies of "
                f"experts and other state, but {left[host] / GIB:.2f} GiB are available; "
                f"{f'give {instead}' if instead else f'remove {flag}'}, or use more nodes."
            )
    return sum(needed.values())
