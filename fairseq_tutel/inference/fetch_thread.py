"""The thread that fetches experts, one after the other.

It holds no reference to the store, so that a store without references is collected and ends the thread.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from fairseq_tutel.inference.expert_buffers import Buffer, BufferLayout

JOIN_SECONDS = 5.0  # for a read that hangs; the thread is a daemon


class Source(Protocol):
    """The source of a stack's experts."""

    layout: BufferLayout

    def read(self, expert: int, buffer: Buffer) -> None:
        """Read an expert into a buffer."""


class Fetch:
    """An expert that has been fetched into a buffer, or will be."""

    def __init__(self, source: Source, expert: int, buffer: Buffer) -> None:
        self.buffer = buffer
        self.is_here = False  # whether the buffer contains the expert
        self.is_new = True  # whether no block has computed with it yet
        self._source, self._expert = source, expert
        self._copied: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Read the expert; on a GPU in another stream."""
        if stream is None:
            self._source.read(self._expert, self.buffer)
        else:
            with torch.cuda.stream(stream):
                if self.buffer.freed is not None:
                    stream.wait_event(self.buffer.freed)
                self._source.read(self._expert, self.buffer)
                self._copied = stream.record_event()
            # Otherwise the allocator could reuse the memory before the copy ends, if the store is closed.
            self.buffer.memory.record_stream(stream)
        self.is_here = True

    def use(self) -> bool:
        """Make the current stream wait for the copy; return whether the expert was used before."""
        if self._copied is not None:
            torch.cuda.current_stream(self.buffer.memory.device).wait_event(self._copied)
        was_new, self.is_new = self.is_new, False
        return not was_new


class Fetcher:
    """A queue of fetches and its thread; after an exception there, every later call raises ValueError."""

    def __init__(self) -> None:
        self._queue: deque[Fetch] = deque()  # those that are needed now, then those ahead
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._ended = ""

    def request(self, fetch: Fetch, ahead: bool = False) -> None:
        """Queue a fetch; one that is `ahead` comes after those that are needed now."""
        with self._changed:
            self.refuse_ended()
            if self._thread is None:
                name = "fairseq_tutel experts"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            (self._queue.append if ahead else self._queue.appendleft)(fetch)
            self._changed.notify_all()

    def wait(self, fetches: Sequence[Fetch]) -> bool:
        """Wait until all experts are fetched; return whether this had to wait."""
        if all(fetch.is_here for fetch in fetches):
            return False
        with self._changed:
            for fetch in fetches:
                if fetch in self._queue:
                    self._queue.remove(fetch)
                    self._queue.appendleft(fetch)
            while not all(fetch.is_here for fetch in fetches):
                self.refuse_ended()
                self._changed.wait()
        return True

    def cancel(self, fetch: Fetch) -> bool:
        """Remove a fetch from the queue; return whether it was there."""
        with self._changed:
            is_queued = fetch in self._queue
            if is_queued:
                self._queue.remove(fetch)
            return is_queued

    def end(self, reason: str) -> None:
        """End the thread after its current read."""
        if self._process != os.getpid():  # the lock may be held by a thread of the parent
            return
        with self._changed:
            self._ended = self._ended or reason
            self._queue.clear()
            self._changed.notify_all()
        # Any thread, this one included, can collect a store without references.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(JOIN_SECONDS)

    @property
    def ended(self) -> str:
        """The reason for which the thread has ended, as a sentence; empty while it runs."""
        if self._process != os.getpid():
            return (
                "the expert store belongs to the parent of this forked process, which cannot use its "
                "thread and files; create a store and open the model in each process."
            )
        return self._ended

    def refuse_ended(self) -> None:
        """Raise ValueError if the thread has ended, or belongs to another process."""
        if self.ended:
            raise ValueError(self.ended)

    def _run(self) -> None:
        stream: torch.cuda.Stream | None = None
        while True:
            with self._changed:
                while not (self._queue or self._ended):
                    self._changed.wait()
                if self._ended:
                    return
                fetch = self._queue.popleft()
            reason = ""
            try:
                device = fetch.buffer.memory.device
                if device.type == "cuda" and stream is None:
                    stream = torch.cuda.Stream(device)
                fetch.run(stream)
            except ValueError as error:  # about a file
                reason = f"the expert store is closed: {error}"
            except Exception as error:
                cause = f"its thread failed ({type(error).__name__}: {error}); open the model again."
                reason = f"the expert store is closed: {cause}"
            with self._changed:
                self._ended = self._ended or reason
                self._changed.notify_all()
