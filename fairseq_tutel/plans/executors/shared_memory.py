"""A file that all ranks of one host map as shared memory, with counters and data regions.

The file has int64 words (counters), and a region of bytes for each rank. Each word has a separate cache
line, and only one rank writes the word. The other ranks put data into a rank's region. The file has a name
only until all ranks have opened it. Rank 0 then allocates all bytes, because a later write to missing
memory would end the process. Killed ranks therefore leave at most an empty file.

Words need no lock, because other processors see the writes of an x86 processor in order. Ranks on other
types of processors cannot share memory. A rank that waits longer than the groups' time-out raises an error.
"""

import mmap
import os
import platform
import time
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import name_ranks, timeout_of_groups

OPERATION = "the opening of shared memory"
FOLDER = "/dev/shm"
# i686 is not in this list, because an i686 writes 64 bits in two stores.
ORDERED = ("x86_64", "AMD64")
PREFIX = "fairseq_tutel-"
WORDS_OF_LINE = 8
# A waiting rank yields the processor after each check. After YIELD_SECONDS, the rank sleeps between checks.
# With more ranks than cores, more frequent checks make small collectives 2 to 4 times slower.
YIELD_SECONDS = 0.001
SLEEP_SECONDS = (0.00005, 0.005)
# A sleep takes this fraction of the time waited so far, limited to the range SLEEP_SECONDS.
SLEEP_PART = 1 / 50


class SharedMemoryError(OSError):
    """The ranks of a group cannot share memory. All ranks raise this error with the same message."""


class SharedMemory:
    """Memory that the ranks of a host share, with int64 `words` and a region of bytes for each rank.

    All ranks of the group must construct this object together. The caller can use `lines` cache lines of
    words, and `size` bytes of each region. With `is_large`, at least half of the file system must stay free
    for other users, such as data loaders.

    Raises:
        SharedMemoryError: the ranks cannot share memory, for the reason in the message.
        CommunicationError: a rank did not join the construction.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, lines: int, size: int, is_large: bool = False
    ) -> None:
        self.group, self.size, self._is_large = group, size, is_large
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._start = _whole_pages(max(1, lines) * WORDS_OF_LINE * 8)
        self._region = _whole_pages(size)
        descriptor = self._share()
        self._mapped = mmap.mmap(descriptor, self._start + self.ranks * self._region)
        os.close(descriptor)
        self.words = memoryview(self._mapped)[: self._start].cast("q")

    def _share(self) -> int:
        """Open the same file on all ranks, and return the file descriptor."""
        path, problem, descriptor = "", "", -1
        if self.rank == 0:
            path = f"{FOLDER}/{PREFIX}{uuid.uuid4().hex}"
            descriptor, problem = _open(path, os.O_CREAT | os.O_EXCL)
            path = "" if problem else path
        try:
            name = world.broadcast_object(path, OPERATION, self.group)
            if name and self.rank:
                descriptor, problem = _open(name, os.O_NOFOLLOW)
            problem = self._first_problem(problem)
        finally:
            if path:
                os.unlink(path)
        if not problem:
            problem = self._first_problem(self._allocate(descriptor) if path else "")
        if problem:
            if descriptor >= 0:
                os.close(descriptor)
            raise SharedMemoryError(f"The ranks cannot share memory: {problem}.")
        return descriptor

    def _first_problem(self, own: str) -> str:
        """Return the problem of the first rank that has one, or "". All ranks must call this method."""
        problems = world.all_gather_object(own, OPERATION, self.group)
        found = (f"on rank {rank} of the group, {each}" for rank, each in enumerate(problems) if each)
        return next(found, "")

    def _allocate(self, descriptor: int) -> str:
        """Allocate all bytes of the file, and return the problem as text, or ""."""
        needed, state = self._start + self.ranks * self._region, os.fstatvfs(descriptor)
        spare = (state.f_bavail - state.f_blocks / 2) * state.f_frsize
        if self._is_large and needed > spare:
            return f"half of {FOLDER} would not stay free"
        try:
            os.posix_fallocate(descriptor, 0, needed)
        except OSError as error:
            return f"{needed // 1024} KiB are needed in {FOLDER} ({error.strerror})"
        return ""

    def region(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a rank's region of the shared memory."""
        return np.frombuffer(self._mapped, np.uint8, self._region, self._start + rank * self._region)


class Backoff:
    """Pauses while waiting for other ranks, by yielding the processor and later sleeping."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._start = memory, time.perf_counter()

    def pause(self, sources: Iterable[int]) -> None:
        """Pause before the next check for signals of the ranks `sources`.

        Raises:
            DistBackendError: the time-out of groups has passed.
        """
        waited = time.perf_counter() - self._start
        if waited < YIELD_SECONDS:
            os.sched_yield()
            return
        group = self._memory.group
        timeout = timeout_of_groups() or distributed_c10d.default_pg_timeout
        if waited > timeout.total_seconds():
            names = name_ranks(sorted({world.rank_in_job(rank, group) for rank in sources}))
            raise dist.DistBackendError(f"{names} did not respond for {waited:.1f} s")
        time.sleep(min(max(waited * SLEEP_PART, SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _open(path: str, flags: int) -> tuple[int, str]:
    """Open a file of shared memory. Return the descriptor (-1 on failure) and the problem as text."""
    if (machine := platform.machine()) not in ORDERED:
        return -1, f"processors of type {machine} do not guarantee the order of writes"
    try:
        return os.open(path, os.O_RDWR | flags, 0o600), ""
    except OSError as error:
        return -1, f"{path} cannot be opened ({error.strerror})"
