"""The free memory of this process: on a GPU, or on the host within the limits of its cgroups."""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.rendezvous import ranks_per_node


class _CgroupFiles(NamedTuple):
    folder: str
    limit: str
    usage: str
    inactive: str  # key in memory.stat: page cache that the kernel frees first


_VERSION_1 = _CgroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _CgroupFiles("", "memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Return the free memory for this rank: of its GPU, or its share of the host memory of the node."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free_bytes() // (ranks_per_node() or world.size())


def host_free_bytes(root: Path = Path("/")) -> int:
    """Return the smaller of MemAvailable and what the memory limits of the process's cgroups leave.

    What a limit leaves is the limit, minus the usage of the cgroup, plus its inactive page cache. `root` is
    the root of the file system, in which /proc and /sys/fs/cgroup are read.

    Raises:
        ValueError: the system has no MemAvailable.
    """
    available = _value_of(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        raise ValueError(
            "cache (--moe-expert-cache) is auto, but this system has no MemAvailable in /proc/meminfo; "
            "give a size, such as 2GiB."
        )
    return max(0, min([available * 1024, *_left_by_cgroups(root)]))


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
