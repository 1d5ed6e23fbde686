"""Channels by themselves: what is put and got arrives with its signal, in memory and through a proxy.

Covered: data and counts both ways, over shared memory and messages, with and without a proxy; packets of
any number of bytes; a FIFO that is full; an error in a proxy's thread, and its end; ranks that cannot share
memory say why, all of them; a rank that ends or stops while others wait is named, and no file is left.
"""

import errno
import os
import platform
import threading
import time

import mortal
import numpy as np
import pytest
import torch.distributed as dist

from fairseq_tutel.comm import shared_memory
from fairseq_tutel.comm.channels import (
    Fifo,
    MemoryChannel,
    MessageChannel,
    PortChannel,
    Proxy,
    Trigger,
    packet_bytes,
)
from fairseq_tutel.comm.shared_memory import SharedMemoryError, meet
from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.guard import guarded

SIZE = 1 << 12
SECONDS = 12  # a time-out, two roll calls, and a busy machine


def threads():
    return [each for each in threading.enumerate() if "serve" in each.name]


def exchange(channel, inbound, own, rank):
    """Send two numbers to the other end, each when the one before has come back from there."""
    got = []
    for call in (1, 2):
        own[:100] = 10 * call + rank
        channel.put(200, 0, 100)
        channel.put_with_signal_and_flush(300, 0, 7)
        own[:100] = 99  # a source may be written after a flush
        channel.wait()
        got.append((set(inbound[200:300].tolist()), set(inbound[300:307].tolist())))
        channel.signal()  # read
        while not channel.poll():
            time.sleep(0.0001)
    assert not channel.poll()
    return got == [({11 - rank}, {11 - rank}), ({21 - rank}, {21 - rank})]


def both_ways():
    rank = dist.get_rank()
    memory = meet(None, 4, SIZE, SIZE)
    own, sent = memory.region(rank), np.zeros(SIZE, np.uint8)
    right = [exchange(MemoryChannel(memory, 0, 1 - rank, sent), own, sent, rank)]
    with Proxy(2) as proxy:
        port = PortChannel(proxy, MemoryChannel(memory, 1, 1 - rank))
        right.append(exchange(port, own, own, rank))
        bytes_here = np.zeros(SIZE, np.uint8)
        messages = MessageChannel(None, 1 - rank, 3, bytes_here)
        port = PortChannel(proxy, messages)
        right.append(exchange(port, bytes_here, bytes_here, rank))
    messages.close()
    with pytest.raises(RuntimeError, match=r"other end is closed, and sends nothing more\.$"):
        messages.wait()
    return right, threads()


def test_what_is_put_arrives_with_its_signal(ranks):
    assert ranks(2).run(both_ways) == [([True] * 3, [])] * 2


def packets():
    rank = dist.get_rank()
    memory = meet(None, 2, SIZE, SIZE)
    own = np.arange(256, dtype=np.uint8) + 100 * rank
    channel = MemoryChannel(memory, 0, 1 - rank, own)
    wrong = []
    for flag, size in enumerate((1, 4, 5, 64, 99), 1):
        start = SIZE // 2 * (flag % 2)
        channel.put_packets(start, 0, size, flag)
        channel.unpack_packets(128, start, size, flag)
        wanted = (np.arange(size) + 100 * (1 - rank)).astype(np.uint8)
        if not np.array_equal(own[128 : 128 + size], wanted) or own[128 + size] == wanted[-1]:
            wrong.append(size)
    channel.signal()
    channel.wait()
    channel.get(0, 8, 8)
    return wrong, own[:8].tolist() == memory.region(1 - rank)[8:16].tolist(), packet_bytes(5)


def test_packets_hold_any_number_of_bytes(ranks):
    assert ranks(2).run(packets) == [([], True, 16)] * 2


class Broken:
    def put(self, target, source, size):
        raise ValueError("no such place")


def test_an_error_in_a_proxy_reaches_its_caller_and_ends_the_thread():
    with pytest.raises(ValueError, match=r"has 3 places; give a power of two\.$"):
        Fifo(3)
    proxy = Proxy(2)
    with pytest.raises(RuntimeError, match=r"^A channel's proxy has failed: no such place\.$"):
        for _ in range(9):  # more than there are places: somebody must be told
            proxy.fifo.push(Trigger(1, Broken()))
    proxy.close()
    with pytest.raises(RuntimeError, match="failed"):
        proxy.fifo.wait(1)
    other = Proxy()
    assert threads()
    del other
    for each in threads():
        each.join(5)
    assert not threads()


def refused(what):
    """Return what each of two ways to have no shared memory says, and what is left of it."""
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
        meet(None, 1, 1 << 20, 1 << 20)
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
    """Wait for rank 1, which meets its fate before or after memory is shared."""
    shared_memory.FOLDER = folder
    guard.set_timeout(1)
    group = dist.new_group(timeout=guard.timeout_of_groups())
    if rank == 1 and is_early:
        fate()
    memory = meet(group, 9, SIZE, SIZE)
    channel = MemoryChannel(memory, 0, 1, memory.region(rank))
    if rank == 1:
        fate()
    with guarded("a wait", group):
        channel.wait()


@pytest.mark.parametrize(
    ("fate", "is_early"),
    [
        (mortal.die, True),
        # Plans in shared memory wait the same way.
        *(pytest.param(fate, False, marks=pytest.mark.long) for fate in (mortal.die, mortal.stop)),
    ],
)
def test_a_dead_or_stopped_rank_is_named_and_no_file_is_left(tmp_path, fate, is_early):
    said, seconds = mortal.run(wait_for, 3, [0, 2], str(tmp_path), fate, is_early)
    for rank, sentence in zip((0, 2), said, strict=True):
        assert f"CommunicationError: rank {rank} could not finish " in sentence
        # gloo tells rank 2 later, which may then be late for rank 0's roll call.
        assert is_early or ": rank 1 did not answer a health check of 1 s" in sentence
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == []
