"""Channels between two ranks: one-sided puts, signals and waits, in memory or through a proxy thread.

Both ends make a channel with the same number; each then puts into the other's region and signals it.

- put and get move bytes between the own region (or any bytes here) and the other end's; put has only
  been asked for until the other end's wait for the next signal, or `flush` here, is over.
- signal adds one to the other end's count. wait takes one of the own count, and comes back when there is
  one; poll takes one if there is one, and says whether.
- put_packets writes every four bytes with a flag beside them; unpack_packets waits for the flag
  instead of a signal. The flag is a number that rises with every call, and packets of every second call lie
  elsewhere, so that nothing is ever cleared.

A `MemoryChannel` does it at once in `shared_memory`; a `MessageChannel` sends messages between hosts.
A `PortChannel` is one of the two whose steps a `Proxy` takes, a thread with a queue.

Source: MSCCL++ (Shah et al. 2025), its memory and its port channel.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from fairseq_tutel.comm.collectives import Started, start_receive, start_send
from fairseq_tutel.plans.executors.shared_memory import (
    Backoff,
    Bytes,
    SharedMemory,
    are_there,
    cells,
    pack,
    unpack,
)
from fairseq_tutel.ranks.guard import CommunicationError

FIFO_SIZE = 512
# Bits of a trigger: put, signal, and somebody waits for it.
DATA, FLAG, SYNC = 1, 2, 4
# Of a message alone: its sender is closed. The last number of its head, which is 0 until it has come.
END, ARRIVED = 8, -1
# Messages that the other end has not taken yet, beyond which a put waits.
MOST_SENT = 1024


class MemoryChannel:
    """One end of a channel in shared memory. Offsets and sizes are in bytes.

    Args:
        memory: of both ends.
        number: of the channel, from 0 on; it uses the lines `number * N` and the N - 1 after it.
        peer: the other end's rank in the memory's group.
        own: where puts read and gets write; by default the own region.
    """

    def __init__(
        self, memory: SharedMemory, number: int, peer: int, own: Bytes | None = None
    ) -> None:
        self.memory, self.peer = memory, peer
        self.own = memory.region(memory.rank) if own is None else own
        self.inbound, self.other = memory.region(memory.rank), memory.region(peer)
        self._out = memory.line(number * memory.ranks + memory.rank)
        self._in = memory.line(number * memory.ranks + peer)
        self._sent = self._taken = 0

    def put(self, target: int, source: int, size: int) -> None:
        """Put own bytes from `source` on to the other end's from `target` on."""
        self.other[target : target + size] = self.own[source : source + size]

    def get(self, target: int, source: int, size: int) -> None:
        """Get the other end's bytes from `source` on to the own from `target` on."""
        self.own[target : target + size] = self.other[source : source + size]

    def signal(self) -> None:
        """Add one to the other end's count."""
        self._sent += 1
        self.memory.words[self._out] = self._sent

    def wait(self) -> None:
        """Take one of the own count.

        Raises:
            DistBackendError: the other end has ended, or did not signal within the time-out of groups.
        """
        self._taken += 1
        self.memory.wait(self._in, self._taken, self.peer)

    def poll(self) -> bool:
        """Take one of the own count if there is one; return whether there was."""
        is_there = self.memory.words[self._in] > self._taken
        self._taken += is_there
        return is_there

    def flush(self) -> None:
        """Wait until the puts have read their sources: they have."""

    def put_with_signal(self, target: int, source: int, size: int) -> None:
        """Put, and signal."""
        self.put(target, source, size)
        self.signal()

    put_with_signal_and_flush = put_with_signal

    def put_packets(self, target: int, source: int, size: int, flag: int) -> None:
        """Put as packets, which take `packet_bytes(size)` from `target` on, a multiple of 8."""
        pack(cells(self.other, target, size), self.own[source : source + size], flag)

    def unpack_packets(self, target: int, source: int, size: int, flag: int) -> None:
        """Wait for packets in the own region from `source` on, and unpack them.

        Raises:
            DistBackendError: as `wait`.
        """
        packets, backoff = cells(self.inbound, source, size), Backoff(self.memory)
        while not are_there(packets, flag):
            backoff.pause([self.peer])
        unpack(packets, self.own[target : target + size])


class MessageChannel:
    """One end of a channel of messages. A put copies its bytes and sends them; waits take what comes.

    Puts and signals may come from another thread than waits, as they do behind a proxy.

    Args:
        group: of both ends; None for all ranks.
        peer: the other end's rank in the group.
        number: of the channel, from 0 on, of those between the two.
        own: bytes that puts read and into which the other end puts.
    """

    def __init__(self, group: dist.ProcessGroup | None, peer: int, number: int, own: Bytes) -> None:
        self._where = (peer, "a channel's message", group, number)
        self.own, self._count, self._has_ended = own, 0, False
        self._sent: deque[tuple[Started, torch.Tensor]] = deque()
        self._listen()

    def put(self, target: int, source: int, size: int) -> None:
        """Put own bytes from `source` on to the other end's from `target` on."""
        self._send(torch.tensor([DATA, target, size, ARRIVED]))
        self._send(torch.from_numpy(self.own[source : source + size].copy()))

    def signal(self) -> None:
        """Add one to the other end's count."""
        self._send(torch.tensor([FLAG, 0, 0, ARRIVED]))

    def wait(self) -> None:
        """Take one of the own count.

        Raises:
            CommunicationError: the other end has ended, or did not signal within the time-out of groups.
            RuntimeError: it is closed.
        """
        while self._count == 0:
            self._take()
        self._count -= 1

    def poll(self) -> bool:
        """Take one of the own count if there is one; return whether there was."""
        while self._count == 0 and not self._has_ended and int(self._header[-1]) == ARRIVED:
            self._take()
        is_there = self._count > 0
        self._count -= is_there
        return is_there

    def close(self) -> None:
        """Wait until both ends have closed; neither end loses what is on its way. Both ends call it.

        Raises:
            CommunicationError: as `wait`.
        """
        self._send(torch.tensor([END, 0, 0, ARRIVED]))
        while not self._has_ended:
            self._take()
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, message: torch.Tensor) -> None:
        # gloo tells of no message that has left but to those that wait for it.
        if len(self._sent) == MOST_SENT:
            self._sent.popleft()[0].wait()
        self._sent.append((start_send(message, *self._where), message))

    def _listen(self) -> None:
        self._header = torch.zeros(4, dtype=torch.int64)
        self._coming = start_receive(self._header, *self._where)

    def _take(self) -> None:
        if self._has_ended:
            raise RuntimeError("A channel's other end is closed, and sends nothing more.")
        self._coming.wait()
        bits, target, size, _ = self._header.tolist()
        if bits == DATA:
            data = torch.from_numpy(self.own[target : target + size])
            start_receive(data, *self._where).wait()
        self._count += bits == FLAG
        self._has_ended = bits == END
        if not self._has_ended:
            self._listen()


class Trigger(NamedTuple):
    """What a proxy is to do: put, then signal, as its bits say; SYNC alone is done by being reached."""

    bits: int
    channel: MemoryChannel | MessageChannel
    target: int = 0
    source: int = 0
    size: int = 0


class Fifo:
    """Triggers on their way to a proxy, in order.

    Args:
        size: how many there may be, a power of two.
    """

    def __init__(self, size: int) -> None:
        if size < 1 or size & (size - 1):
            raise ValueError(f"A proxy's FIFO has {size} places; give a power of two.")
        self._slots: list[Trigger | None] = [None] * size
        self._pushed = self._done = 0
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def push(self, trigger: Trigger) -> int:
        """Hand a trigger over, when there is a place; return its number, from 1 on."""
        with self._changed:
            self._until(lambda: self._pushed - self._done < len(self._slots))
            self._slots[self._pushed & (len(self._slots) - 1)] = trigger
            self._pushed += 1
            self._changed.notify_all()
            return self._pushed

    def wait(self, number: int) -> None:
        """Wait until a trigger is done."""
        with self._changed:
            self._until(lambda: self._done >= number)

    def close(self) -> None:
        """Let the proxy end when it has done what was pushed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def serve(self) -> None:
        """Do what is pushed, until there is an error or this is closed and nothing left."""
        try:
            while trigger := self._next():
                if trigger.bits & DATA:
                    trigger.channel.put(trigger.target, trigger.source, trigger.size)
                if trigger.bits & FLAG:
                    trigger.channel.signal()
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, the caller waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Trigger | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pushed > self._done)
            is_left = self._pushed > self._done
            return self._slots[self._done & (len(self._slots) - 1)] if is_left else None

    def _until(self, holds: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or self._closed or holds())
        if isinstance(self._error, CommunicationError):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"A channel's proxy has failed: {self._error}.") from self._error
        if not holds():
            raise RuntimeError("A channel's proxy is closed.")


class Proxy:
    """A thread that puts and signals for others. It ends with `close`, the block or this object.

    Args:
        size: of its FIFO.
    """

    def __init__(self, size: int = FIFO_SIZE) -> None:
        self.fifo = Fifo(size)
        self._thread = threading.Thread(target=self.fifo.serve, daemon=True)
        self._thread.start()
        weakref.finalize(self, self.fifo.close)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, after what was pushed."""
        self.fifo.close()
        self._thread.join()


class PortChannel:
    """One end of a channel whose puts and signals a proxy does. Offsets and sizes are in bytes.

    Args:
        proxy: may serve many.
        channel: on which it does them.
    """

    def __init__(self, proxy: Proxy, channel: MemoryChannel | MessageChannel) -> None:
        self.proxy, self.channel = proxy, channel
        self.wait, self.poll = channel.wait, channel.poll

    def put(self, target: int, source: int, size: int) -> None:
        """Put own bytes from `source` on to the other end's from `target` on."""
        self._push(DATA, target, source, size)

    def signal(self) -> None:
        """Add one to the other end's count."""
        self._push(FLAG)

    def put_with_signal(self, target: int, source: int, size: int) -> None:
        """Put, and signal."""
        self._push(DATA | FLAG, target, source, size)

    def put_with_signal_and_flush(self, target: int, source: int, size: int) -> None:
        """Put, signal, and wait until the source has been read."""
        self.proxy.fifo.wait(self._push(DATA | FLAG | SYNC, target, source, size))

    def flush(self) -> None:
        """Wait until the proxy has done what was pushed.

        Raises:
            CommunicationError: the other end has ended.
            RuntimeError: the proxy met another error, or was closed.
        """
        self.proxy.fifo.wait(self._push(SYNC))

    def _push(self, bits: int, target: int = 0, source: int = 0, size: int = 0) -> int:
        return self.proxy.fifo.push(Trigger(bits, self.channel, target, source, size))
