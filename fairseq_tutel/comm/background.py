"""Work beside the computation: on the CPU in one communication thread, on a GPU on a stream of its own.

One thread, so that collectives start in the same order on every rank.
"""

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

LEAVE_SECONDS = 1.0


class Pending(Protocol):
    """A tensor that is on its way."""

    def result(self) -> Tensor:
        """Return it; what follows on this thread, or on this stream, comes after it."""


def start(function: Callable[[Tensor], Tensor], rows: Tensor) -> Pending:
    """Begin `function(rows)`, which is not differentiated, and return at once.

    Where one fails, those that were begun before its error was seen fail too, unsent: a peer would take
    their rows for those of the failed one.
    """
    if rows.is_cuda:
        return _start_on_stream(function, rows)
    future: Future[Tensor] = Future()
    _jobs().put((function, rows, future, _Thread.errors_seen))
    return _InThread(future)


@dataclass(frozen=True)
class _InThread:
    future: "Future[Tensor]"

    def result(self) -> Tensor:
        try:
            return self.future.result()
        except BaseException:
            _Thread.errors_seen += 1
            raise


class _Thread:
    """Made at the first use, and again in a forked child, which has none of its parent's threads."""

    jobs: "queue.SimpleQueue[Any] | None" = None
    thread: threading.Thread | None = None
    errors_seen = 0


def _jobs() -> "queue.SimpleQueue[Any]":
    if _Thread.jobs is None or _Thread.thread is None or not _Thread.thread.is_alive():
        _Thread.jobs = queue.SimpleQueue()
        # A daemon: after an error elsewhere nobody waits for a peer's answer, see `_leave`.
        _Thread.thread = threading.Thread(
            target=_work, args=(_Thread.jobs,), name="communication", daemon=True
        )
        _Thread.thread.start()
    return _Thread.jobs


def _leave() -> None:
    """End the thread before the interpreter ends.

    After an error a peer may still be waited for, in the thread or in gloo's own; torn down there, they
    abort the process, whose error a launcher would take for a crash. So it ends here, as failed.
    """
    if _Thread.jobs is None or _Thread.thread is None:
        return
    _Thread.jobs.put(None)
    failed = hasattr(sys, "last_type")  # the interpreter has printed an error that nobody caught
    if not failed:
        _Thread.thread.join(LEAVE_SECONDS)
    if failed or _Thread.thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# At import, so that what others do at the end, which was registered later, is done before.
atexit.register(_leave)


def _work(jobs: "queue.SimpleQueue[Any]") -> None:
    failure: BaseException | None = None
    failed_at = -1
    while True:
        job = jobs.get()
        if job is None:
            return
        function, rows, future, errors_seen = job
        try:
            if failure is not None and errors_seen == failed_at:
                raise failure
            failure = None
            with torch.no_grad():
                future.set_result(function(rows))
        except BaseException as error:  # raised again where the result is asked for
            failure, failed_at = error, errors_seen
            future.set_exception(error)
        # Nothing may keep tensors alive until the next job comes.
        del job, function, rows, future


@dataclass(frozen=True)
class _OnStream:
    out: Tensor
    done: Any

    def result(self) -> Tensor:
        current = torch.cuda.current_stream(self.out.device)
        current.wait_event(self.done)
        self.out.record_stream(current)
        return self.out


_streams: dict[torch.device, Any] = {}


def _start_on_stream(function: Callable[[Tensor], Tensor], rows: Tensor) -> _OnStream:
    if rows.device not in _streams:
        _streams[rows.device] = torch.cuda.Stream(rows.device)
    stream = _streams[rows.device]
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream), torch.no_grad():
        rows.record_stream(stream)
        out = function(rows)
        done = torch.cuda.Event()
        done.record(stream)
    return _OnStream(out, done)
