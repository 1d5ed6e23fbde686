"""A thread that fetches offloaded experts, one after the other.

The thread has no reference to the expert store. Python can therefore garbage-collect an unused store.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from fairseq_tutel.inference.expert_buffers import Buffer

JOIN_SECONDS = 5.0  # `end` waits this long for a read that hangs.


class Fetch:
    """A pending or completed fetch of one expert into a buffer, by a source's function `read`."""

    def __init__(self, read: Callable[[int, Buffer], None], expert: int, buffer: Buffer) -> None:
        self.buffer = buffer
        self.is_here = False  # True if the buffer contains the expert.
        self.is_new = True  # True if no layer call has used the expert yet.
        self._read, self._expert = read, expert
        self._copied: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Read the expert into the buffer; if the buffer is on a GPU, use the CUDA stream `stream`."""
        if stream is None:
            self._read(self._expert, self.buffer)
        else:
            with torch.cuda.stream(stream):
                if self.buffer.freed is not None:
                    stream.wait_event(self.buffer.freed)
                self._read(self._expert, self.buffer)
                self._copied = stream.record_event()
            # Without record_stream, torch could reuse the memory of a closed store during the copy.
            self.buffer.memory.record_stream(stream)
        self.is_here = True

    def use(self) -> bool:
        """Make the current CUDA stream wait for the expert; return whether the expert was used before."""
        if self._copied is not None:
            torch.cuda.current_stream(self.buffer.memory.device).wait_event(self._copied)
        was_new, self.is_new = self.is_new, False
        return not was_new


class Fetcher:
    """A queue of fetches, and a thread that runs the fetches.

    After an exception in the fetch thread, further fetches raise ValueError.
    """

    def __init__(self) -> None:
        self._queue: deque[Fetch] = deque()  # Fetches that are needed now come before prefetches.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._ended = ""

    def request(self, fetch: Fetch, ahead: bool = False) -> None:
        """Queue the fetch of an expert as the next fetch or, with `ahead`, as the last fetch."""
        with self._changed:
            self.refuse_ended()
            if self._thread is None:
                name = "fairseq_tutel experts"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            (self._queue.append if ahead else self._queue.appendleft)(fetch)
            self._changed.notify_all()

    def wait(self, fetches: Sequence[Fetch]) -> bool:
        """Wait until all given fetches have completed, and return whether a wait was necessary."""
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
        """Remove a fetch from the queue, and return whether the fetch was still queued."""
        with self._changed:
            is_queued = fetch in self._queue
            if is_queued:
                self._queue.remove(fetch)
            return is_queued

    def end(self, reason: str) -> None:
        """End the thread after the current read; later calls raise ValueError with the text `reason`."""
        if self._process != os.getpid():  # A forked copy of the lock may never be released.
            return
        with self._changed:
            self._ended = self._ended or reason
            self._queue.clear()
            self._changed.notify_all()
        # The fetch thread itself calls this method if it garbage-collects an unused store.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(JOIN_SECONDS)

    @property
    def ended(self) -> str:
        """A sentence with the reason why the thread has ended; empty while the thread runs."""
        if self._process != os.getpid():
            return (
                "the expert store was created before this process was forked, and cannot be used after a "
                "fork; create a store and open the model in each process."
            )
        return self._ended

    def refuse_ended(self) -> None:
        """Raise ValueError if the fetch thread has ended, or belongs to another process."""
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
                    # Without set_device, leaving a stream context would create a CUDA context on GPU 0.
                    torch.cuda.set_device(device)
                    stream = torch.cuda.Stream(device)
                fetch.run(stream)
            except Exception as error:
                reason = f"the expert store is closed ({type(error).__name__}): {error}"
            with self._changed:
                self._ended = self._ended or reason
                self._changed.notify_all()
