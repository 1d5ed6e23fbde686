"""Reads how much host memory is available on this machine, or in this container."""

import socket
from collections import defaultdict
from pathlib import Path

from fairseq_tutel.ranks import world

# Files of a memory control group, version 2 and 1: its limit and its use, in bytes.
GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
GIB = 2**30


def available() -> int | None:
    """Return the bytes of host memory that processes can still allocate, or None if unknown."""
    found = [left for left in (_of_machine(), *(_of_group(*files) for files in GROUPS)) if left is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group(limit: str, use: str) -> int | None:
    try:
        return int(Path(limit).read_text()) - int(Path(use).read_text())
    except (OSError, ValueError):  # there is no such group, or it has no limit ("max")
        return None


def refuse_too_little(num_bytes: int, flag: str) -> int:
    """Raise ValueError on all ranks if the ranks of any machine need more memory than it has. Collective.

    `num_bytes` is what this rank needs for the option `flag`. Returns the bytes that all ranks need.
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
                f"experts and other state, but {left[host] / GIB:.2f} GiB are available; remove {flag}, or "
                "use more nodes."
            )
    return sum(needed.values())
