"""The thread that fetches experts, one after the other.

It knows what it is to read and where to, and nobody else: a store that is forgotten can be collected, and
its thread ends with it.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from fairseq_tutel.inference.expert_slots import Layout, Slot

JOIN_SECONDS = 5.0  # for a read that hangs; the thread is a daemon


class Source(Protocol):
    """Where the experts of a stack are."""

    layout: Layout

    def read(self, expert: int, slot: Slot) -> None:
        """Read an expert into a slot."""


class Fetch:
    """An expert that has a slot: there, or on its way.

    Attributes:
        slot: where it is, or will be.
        is_here: whether it is.
        is_new: whether no block has computed with it since it was asked for.
    """

    def __init__(self, source: Source, expert: int, slot: Slot) -> None:
        self.slot, self.is_here, self.is_new = slot, False, True
        self._source, self._expert = source, expert
        self._copied: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Read it; on a GPU in a stream of its own."""
        if stream is None:
            self._source.read(self._expert, self.slot)
        else:
            with torch.cuda.stream(stream):
                if self.slot.freed is not None:
                    stream.wait_event(self.slot.freed)
                self._source.read(self._expert, self.slot)
                self._copied = stream.record_event()
            # Or where the store is closed, who gets the memory next would be written to.
            self.slot.memory.record_stream(stream)
        self.is_here = True

    def use(self) -> bool:
        """Let what is computed next wait for the copy; return whether the expert was used before."""
        if self._copied is not None:
            torch.cuda.current_stream(self.slot.memory.device).wait_event(self._copied)
        was_new, self.is_new = self.is_new, False
        return not was_new


class Fetcher:
    """A queue and the thread that empties it, which begins with the first fetch.

    An exception in the thread ends it: all that is asked of it from then on raises.
    """

    def __init__(self) -> None:
        self._wanted: deque[Fetch] = deque()
        self._ahead: deque[Fetch] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._ended = ""

    def ask(self, fetch: Fetch, ahead: bool = False) -> None:
        """Have an expert fetched; after those that are wanted now, where it is for later."""
        with self._changed:
            self.refuse_ended()
            if self._thread is None:
                name = "fairseq_tutel experts"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            (self._ahead if ahead else self._wanted).append(fetch)
            self._changed.notify_all()

    def wait(self, fetches: Sequence[Fetch]) -> bool:
        """Return once all are there, and whether they were not.

        Raises:
            ValueError: one could not be fetched.
        """
        if all(fetch.is_here for fetch in fetches):
            return False
        with self._changed:
            for fetch in fetches:
                if fetch in self._ahead:
                    self._ahead.remove(fetch)
                    self._wanted.append(fetch)
            while not all(fetch.is_here for fetch in fetches):
                self.refuse_ended()
                self._changed.wait()
        return True

    def cancel(self, fetch: Fetch) -> bool:
        """Forget about an expert whose turn has not come; return whether there was one to forget."""
        with self._changed:
            for queue in (self._wanted, self._ahead):
                if fetch in queue:
                    queue.remove(fetch)
                    return True
        return False

    def end(self, reason: str) -> None:
        """End the thread for good, once it has read what it is reading."""
        if self._process != os.getpid():  # the lock may be taken, by a thread that is not here
            return
        with self._changed:
            self._ended = self._ended or reason
            self._wanted.clear()
            self._ahead.clear()
            self._changed.notify_all()
        # Of a store that is forgotten, any thread may collect what is left, this one, too.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(JOIN_SECONDS)

    @property
    def ended(self) -> str:
        """Why there is no thread any more, in a sentence; nothing while it may be asked."""
        if self._process != os.getpid():
            return (
                "the expert store was made by the process that this one was forked from, whose thread "
                "and files it cannot use; make one, and open the model, in each process."
            )
        return self._ended

    def refuse_ended(self) -> None:
        """Refuse to go on without the thread.

        Raises:
            ValueError: it was ended, or something ended it, or it is another process's.
        """
        if self.ended:
            raise ValueError(self.ended)

    def _run(self) -> None:
        stream: torch.cuda.Stream | None = None
        while True:
            with self._changed:
                while not (self._wanted or self._ahead or self._ended):
                    self._changed.wait()
                if self._ended:
                    return
                fetch = (self._wanted or self._ahead).popleft()
            try:
                device = fetch.slot.memory.device
                if device.type == "cuda" and stream is None:
                    stream = torch.cuda.Stream(device)
                fetch.run(stream)
            except Exception as error:  # whatever it is, who waits must hear of it
                self._fail(error)
                return
            with self._changed:
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        said = str(error)
        if not isinstance(error, ValueError):  # nobody's file
            said = f"its thread failed ({type(error).__name__}: {error}); open the model again."
        with self._changed:
            self._ended = self._ended or f"the expert store is closed, for {said}"
            self._changed.notify_all()
