"""Shared memory of ranks: what happens if it cannot be had, or a rank ends.

Ranks that cannot share memory all raise the same reason. A rank that ends or stops while others wait is
named, and no file is left.
"""

import errno
import os
import platform

import mortal
import pytest
import torch.distributed as dist

from fairseq_tutel.plans.executors import shared_memory
from fairseq_tutel.plans.executors.shared_memory import SharedMemoryError, rendezvous
from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.guard import guarded

SIZE = 1 << 12
SECONDS = 12  # a timeout, two health checks and a busy machine


def refused(what):
    """Return the error of `rendezvous` without shared memory."""
    patch = pytest.MonkeyPatch()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if what == "full":
        patch.setattr(os, "posix_fallocate", full)
    elif what == "order" and dist.get_rank() == 1:
        patch.setattr(platform, "machine", lambda: "aarch64")
    elif what == "host" and dist.get_rank() == 1:
        patch.setattr(os, "open", lambda path, *_: full() if "/dev/shm" in path else -1)
    try:
        rendezvous(None, 1, 1 << 20, 1 << 20)
    except SharedMemoryError as error:
        return str(error)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("full", r"20\d\d KiB are needed and \d+ are free in \S+ \(No space left on device\)\.$"),
        ("order", r"on rank 1 of the group a aarch64 does not show writes in their order\.$"),
        (
            "host",
            r"on rank 1 of the group /dev/shm/\S+ cannot be opened \(No space left on device\)",
        ),
    ],
)
def test_ranks_that_cannot_share_memory_say_why_all_alike(ranks, what, sentence):
    first, second = ranks(2).run(refused, what)
    assert first == second
    with pytest.raises(SharedMemoryError, match=sentence):
        raise SharedMemoryError(first)


def wait_for(rank, folder, fate, is_early):
    """Wait for rank 1, which dies or stops before or after memory is shared."""
    shared_memory.FOLDER = folder
    guard.set_timeout(1)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    if rank == 1 and is_early:
        fate()
    memory = rendezvous(group, 9, SIZE, SIZE)
    if rank == 1:
        fate()
    with guarded("a wait", group):
        memory.barrier()


@pytest.mark.parametrize(
    ("fate", "is_early"),
    [
        (mortal.die, True),
        *(pytest.param(fate, False, marks=pytest.mark.long) for fate in (mortal.die, mortal.stop)),
    ],
)
def test_a_dead_or_stopped_rank_is_named_and_no_file_is_left(tmp_path, fate, is_early):
    said, seconds = mortal.run(wait_for, 3, [0, 2], str(tmp_path), fate, is_early)
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"CommunicationError: rank {rank} could not finish " in sentence
        # gloo's error reaches rank 2 later, which may then be late for rank 0's health check.
        assert is_early or ": rank 1 did not answer a health check of 1 s" in sentence
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == []
