"""Memory that the ranks of one host share: a file that all ranks map, with counters and data regions.

The file has int64 words and a region of bytes for each rank. Each word has its own cache line, and only one
rank writes it. The other ranks put data into a rank's region. The file has a name only until all ranks have
opened it, and is empty until then. So killed ranks leave at most an empty file. The file is mapped at its
largest possible size. Bytes are allocated before use, because a write to unallocated memory would end the
process.

Words need no lock, because an x86 processor shows its writes to other processors in order. Other types of
processors are refused. A rank that waits for longer than the timeout of groups raises an error.
"""

import mmap
import os
import platform
import time
import uuid
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import name_ranks, timeout_of_groups

OPERATION = "the opening of shared memory"
FOLDER = "/dev/shm"
# i686 is not in this list, because it writes 64 bits in two stores.
ORDERED = ("x86_64", "AMD64")
PREFIX = "fairseq_tutel-"
WORDS_OF_LINE = 8
# A wait yields the processor after each check, and sleeps after YIELD_SECONDS. If there are more ranks than
# cores, more frequent checks make small collectives 2 to 4 times slower.
YIELD_SECONDS = 0.001
SLEEP_SECONDS = (0.00005, 0.005)
# The length of a sleep as a fraction of the time waited so far.
SLEEP_PART = 1 / 50


class SharedMemoryError(OSError):
    """The ranks of a group cannot share memory; all ranks raise this error with the same message."""


class SharedMemory:
    """Memory that ranks of a host share: int64 `words`, and a region of bytes for each of these ranks.

    All ranks of the group must construct this together. The caller can use `lines` cache lines of words. A
    region has `size` bytes at first, and can grow to `region` bytes.

    Raises:
        SharedMemoryError: the ranks cannot share memory; the message has the reason.
        CommunicationError: a rank did not take part in the construction.
    """

    def __init__(self, group: dist.ProcessGroup | None, lines: int, region: int, size: int) -> None:
        self.group, self.size = group, size
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._first = self.ranks + 1  # one line per rank for `barrier`, and one line for `grow`
        self._start = _whole_pages((self._first + lines) * WORDS_OF_LINE * 8)
        self._region = _whole_pages(region)
        self._descriptor = self._share()
        self._mapped = mmap.mmap(self._descriptor, self._start + self.ranks * self._region)
        self.words = memoryview(self._mapped)[: self._start].cast("q")
        self._barriers = self._generation = 0
        weakref.finalize(self, os.close, self._descriptor)

    def _share(self) -> int:
        """Open one file on all ranks, and return the file descriptor."""
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
            if path:
                os.ftruncate(descriptor, self._start + self.ranks * self._region)
                problem = self._allocate(descriptor, self.size, self._start)
            problem = self._first_problem(problem)
        if problem:
            if descriptor >= 0:
                os.close(descriptor)
            raise SharedMemoryError(f"The ranks cannot share memory: {problem}.")
        return descriptor

    def _first_problem(self, own: str) -> str:
        """Return the problem of the first rank of the group that has one, or "". Collective."""
        problems = world.all_gather_object(own, OPERATION, self.group)
        found = (f"on rank {rank} of the group, {each}" for rank, each in enumerate(problems) if each)
        return next(found, "")

    def _allocate(self, descriptor: int, size: int, words: int = 0) -> str:
        """Allocate `words` bytes for all words and `size` bytes per region; return an error text, or ""."""
        regions = [(self._start + rank * self._region, size) for rank in range(self.ranks)]
        ranges = [(start, length) for start, length in [(0, words), *regions] if length]
        try:
            for start, length in ranges:
                os.posix_fallocate(descriptor, start, length)
        except OSError as error:
            needed = sum(length for _, length in ranges) // 1024
            return f"{needed} KiB are needed in {FOLDER} ({error.strerror})"
        return ""

    def line(self, index: int) -> int:
        """Return the index in `words` of the first word of a cache line that the caller can use."""
        return (self._first + index) * WORDS_OF_LINE

    def region(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a rank's region of the shared memory; only its first `size` bytes are allocated."""
        start = self._start + rank * self._region
        return np.frombuffer(self._mapped, np.uint8, self._region, start)

    def wait(self, word: int, least: int, source: int) -> None:
        """Wait until the value of a word, which rank `source` writes, is at least `least`.

        Raises:
            DistBackendError: this rank did not write within the timeout of groups.
        """
        if self.words[word] < least:
            backoff = Backoff(self)
            while self.words[word] < least:
                backoff.pause([source])

    def barrier(self) -> None:
        """Wait until all ranks have called this function."""
        self._barriers += 1
        self.words[self.rank * WORDS_OF_LINE] = self._barriers
        for rank in range(self.ranks):
            self.wait(rank * WORDS_OF_LINE, self._barriers, rank)

    def grow(self, size: int) -> bool:
        """Grow all regions to `size` bytes, and return whether there was enough memory.

        All ranks must call this together. The contents of the regions are lost. At least half of the
        folder stays free for other users, such as data loaders.
        """
        self.barrier()
        self._generation += 1
        word = self.ranks * WORDS_OF_LINE
        if self.rank == 0:
            state = os.fstatvfs(self._descriptor)
            left = state.f_bavail * state.f_frsize - (size - self.size) * self.ranks
            is_spare = left >= state.f_blocks * state.f_frsize / 2
            grown = is_spare and not self._allocate(self._descriptor, size)
            self.words[word] = 2 * self._generation + grown
        self.wait(word, 2 * self._generation, 0)
        grown = self.words[word] == 2 * self._generation + 1
        self.size = size if grown else self.size
        return grown


class Backoff:
    """Pauses while waiting for other ranks: yields the processor, later sleeps, and fails at a timeout."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._start = memory, time.perf_counter()

    def pause(self, sources: Iterable[int]) -> None:
        """Pause between two checks while waiting for the ranks `sources`.

        Raises:
            DistBackendError: the timeout of groups has passed.
        """
        waited = time.perf_counter() - self._start
        if waited < YIELD_SECONDS:
            os.sched_yield()
            return
        group = self._memory.group
        timeout = timeout_of_groups() or timeout_of(group)
        if waited > timeout.total_seconds():
            names = name_ranks(sorted({world.rank_in_job(rank, group) for rank in sources}))
            raise dist.DistBackendError(f"{names} did not respond for {waited:.1f} s")
        time.sleep(min(max(waited * SLEEP_PART, SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a process group's CPU backend; None means the default group."""
    found = group or dist.group.WORLD
    assert found is not None
    return cast(timedelta, found._get_backend(torch.device("cpu")).options._timeout)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _open(path: str, flags: int) -> tuple[int, str]:
    """Open a file of shared memory; return the descriptor (-1 on failure) and the problem as text."""
    if (machine := platform.machine()) not in ORDERED:
        return -1, f"processors of type {machine} do not guarantee the order of writes"
    try:
        return os.open(path, os.O_RDWR | flags, 0o600), ""
    except OSError as error:
        return -1, f"{path} cannot be opened ({error.strerror})"
