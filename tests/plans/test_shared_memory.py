"""Errors of shared memory: it is not available, or a rank ends."""

import errno
import os
import platform

import mortal
import pytest
import torch.distributed as dist

from fairseq_tutel.parallel import guard
from fairseq_tutel.plans.executors import shared_memory
from fairseq_tutel.plans.executors.shared_memory import SharedMemory, SharedMemoryError

SIZE = 1 << 12


def refused(what):
    """Return the error that `SharedMemory` raises if shared memory is not available."""
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
        SharedMemory(None, 1, 1 << 20)
    except SharedMemoryError as error:
        return str(error)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("full", r"20\d\d KiB are needed in \S+ \(No space left on device\)\.$"),
        (
            "order",
            r"on rank 1 of the group, processors of type aarch64 do not guarantee the order of writes\.$",
        ),
        ("host", r"on rank 1 of the group, /dev/shm/\S+ cannot be opened \(No space left on device\)"),
    ],
)
def test_all_ranks_raise_the_same_error_if_they_cannot_share_memory(ranks, what, sentence):
    first, second = ranks(2).run(refused, what)
    assert first == second
    with pytest.raises(SharedMemoryError, match=sentence):
        raise SharedMemoryError(first)


def wait_for(rank, folder):
    """Wait for rank 1, which dies before memory is shared."""
    shared_memory.FOLDER = folder
    guard.set_timeout(1)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    if rank == 1:
        mortal.die()
    SharedMemory(group, 9, SIZE)


def test_errors_name_a_rank_that_dies_early_and_no_file_is_left(tmp_path):
    said, seconds = mortal.run(wait_for, 3, [0, 2], str(tmp_path))
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"CommunicationError: rank {rank} could not finish " in sentence
    assert seconds < 12  # the limit covers a timeout and two health checks on a busy machine
    assert list(tmp_path.iterdir()) == []
