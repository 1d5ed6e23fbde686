"""The look at the checkpoint that a training goes on from: one rank reads a file that several share.

Ranks are threads.
"""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fairseq_tutel.checkpoint import files
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.training import resume

SECONDS = 60


class _Ranks:
    """What is used of torch.distributed, for threads."""

    def __init__(self, world_size):
        self.world_size, self.told = world_size, [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self.of_thread = threading.local()

    def is_initialized(self):
        return self.world_size > 1

    def get_world_size(self, group=None):
        return self.world_size

    def get_rank(self):
        return getattr(self.of_thread, "rank", 0)  # a rank reads its file in a thread of its own

    def all_gather_object(self, out, own, group=None):
        self.told[self.get_rank()] = own
        self.barrier.wait(SECONDS)
        out[:] = self.told
        self.barrier.wait(SECONDS)


@pytest.fixture
def look(monkeypatch):
    """Return a function from every rank's path to (files that were read, what each was told)."""

    def of(paths):
        ranks, read, is_whole = _Ranks(len(paths)), [], files.is_whole
        monkeypatch.setattr(world, "dist", ranks)
        monkeypatch.setattr(files, "is_whole", lambda p: read.append(os.path.basename(p)) or is_whole(p))

        def on(rank):
            ranks.of_thread.rank = rank
            try:
                return resume._found_by_all(str(paths[rank]))
            except (ValueError, OSError) as error:
                return str(error)

        with ThreadPoolExecutor(len(paths)) as pool:
            found = list(pool.map(on, range(len(paths))))
        return sorted(read), found

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return of


@pytest.fixture
def saved(tmp_path):
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # among the numbers
    path.write_bytes(data)


def test_one_of_the_ranks_that_share_a_file_reads_it(look, saved):
    read, found = look([saved] * 3)
    assert read == ["a.pt"] and found == [[files.identity(str(saved))] * 3] * 3
    damage(saved)
    read, found = look([saved] * 3)
    assert read == ["a.pt"] and all(resume.CORRUPT in told for told in found)


def test_every_copy_is_read(look, saved, tmp_path):
    copies = [saved, saved, tmp_path / "b.pt"]
    shutil.copy2(saved, copies[2])
    read, found = look(copies)
    assert read == ["a.pt", "b.pt"] and resume.CORRUPT not in found[0]
    damage(copies[2])
    read, found = look(copies)
    assert read == ["a.pt", "b.pt"] and all(resume.CORRUPT in told for told in found)


def test_a_rank_that_is_alone_reads_its_own(look, saved):
    assert look([saved])[0] == ["a.pt"]
    assert look([saved.with_name("none.pt")]) == ([], [[resume.NOTHING]])
