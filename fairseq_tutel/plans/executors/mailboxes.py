"""Messages between the ranks of one host, through shared memory.

`TwoSided` uses them for a plan whose ranks are on several hosts. Messages to other hosts still use gloo.

A message is a stream of bytes, in one or more pieces. There is a mailbox for each sender and receiver, with
SLOTS slots. The sender fills the next free slot and raises a counter. The receiver empties the slot and
raises another counter. So a message that fits into the free slots is sent before its receiver reads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from fairseq_tutel.plans.executors.shared_memory import Backoff, SharedMemory

SLOTS = 2  # the sender fills one while the receiver empties the other
# The bytes of a slot, and the most bytes of all mailboxes of a rank.
SLOT_BYTES, MOST_BYTES = 1 << 18, 1 << 22

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Ranks of the group, each with the pieces of a message to it or from it.
Messages = Iterable[tuple[int, Sequence[Bytes]]]


class Mailboxes:
    """The mailboxes of the ranks of a group that are on this rank's host.

    All ranks of the group must construct this together. `hosts` has the host of each rank.

    Raises:
        SharedMemoryError: the ranks of a host cannot share memory; all ranks of the group raise this error.
        CommunicationError: a rank did not take part in the construction.
    """

    def __init__(self, group: dist.ProcessGroup | None, hosts: Sequence[int]) -> None:
        self.hosts = hosts
        own = hosts[dist.get_rank(group)]
        members = [rank for rank, host in enumerate(hosts) if host == own]
        self._index = {rank: index for index, rank in enumerate(members)}
        count = len(members)
        self._slot = min(SLOT_BYTES, MOST_BYTES // count // SLOTS)
        # Each sender has a mailbox in the receiver's region.
        region = SLOTS * self._slot * count
        self._memory = SharedMemory(group, 2 * count * count, region, region, members)
        self._moved = 0  # slots that this rank has filled or emptied

    def exchange(self, send: Messages, receive: Messages) -> None:
        """Send and receive messages at the same time.

        At most one message goes to each rank, and at most one comes from each. All ranks of the host must
        exchange messages in the same order.

        Raises:
            DistBackendError: a rank has ended, or did not respond within the timeout of groups.
        """
        own, index = self._memory.rank, self._index
        waiting = [(index[rank], self._move(own, index[rank], pieces)) for rank, pieces in send]
        waiting += [(index[rank], self._move(index[rank], own, pieces)) for rank, pieces in receive]
        backoff = None
        while True:
            before = self._moved
            waiting = [each for each in waiting if next(each[1], None) is not None]
            if not waiting:
                return
            if self._moved > before:
                backoff = None
            else:
                backoff = backoff or Backoff(self._memory)
                backoff.pause(member for member, _ in waiting)

    def _move(self, source: int, target: int, pieces: Sequence[Bytes]) -> Iterator[bool]:
        """Send or receive the pieces of a message; yield whenever the other member must act first."""
        memory, words = self._memory, self._memory.words
        sends, count = source == memory.rank, memory.ranks
        filled = memory.line(source * count + target)
        emptied = memory.line((count + source) * count + target)
        mailbox = memory.region(target)[source * SLOTS * self._slot :]
        own, blocked = (filled, SLOTS) if sends else (emptied, 0)
        for parts in _cut(pieces, self._slot):
            while words[filled] - words[emptied] == blocked:
                yield True
            slot = mailbox[words[own] % SLOTS * self._slot :]
            for first, part in parts:
                place = slot[first : first + len(part)]
                if sends:
                    place[...] = part
                else:
                    part[...] = place
            words[own] += 1
            self._moved += 1


def _cut(pieces: Sequence[Bytes], size: int) -> Iterator[list[tuple[int, Bytes]]]:
    """Yield the content of each slot of `size` bytes: parts of the pieces, with their positions."""
    parts: list[tuple[int, Bytes]] = []
    end = 0
    for piece in pieces:
        while len(piece):
            part, piece = piece[: size - end], piece[size - end :]
            parts.append((end, part))
            end += len(part)
            if end == size:
                yield parts
                parts, end = [], 0
    if parts:
        yield parts
