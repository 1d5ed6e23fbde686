"""Work in parallel to the computation: in a communication thread on a CPU, on another stream on a GPU.

There is one thread, so that collectives start in the same order on every rank.
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
    """A tensor that is not yet computed."""

    def result(self) -> Tensor:
        """Wait, on this thread or on this stream, and return the tensor."""


def start(function: Callable[[Tensor], Tensor], rows: Tensor) -> Pending:
    """Begin `function(rows)`, without autograd, and return at once.

    After a failure, queued jobs fail without sending: a peer would take their rows for those of the failed
    job. Jobs that start after the error was raised run again.
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
    """The communication thread, started at the first use, and again in a forked process."""

    jobs: "queue.SimpleQueue[Any] | None" = None
    thread: threading.Thread | None = None
    errors_seen = 0


def _jobs() -> "queue.SimpleQueue[Any]":
    if _Thread.jobs is None or _Thread.thread is None or not _Thread.thread.is_alive():
        _Thread.jobs = queue.SimpleQueue()
        # A daemon: after an error elsewhere the thread may wait for a peer forever, see `_leave`.
        _Thread.thread = threading.Thread(
            target=_work, args=(_Thread.jobs,), name="communication", daemon=True
        )
        _Thread.thread.start()
    return _Thread.jobs


def _leave() -> None:
    """End the thread before the interpreter exits.

    After an error, this thread or one of gloo may still wait for a peer. At interpreter exit that aborts
    the process, which a launcher would report as a crash. So the process exits here, with status 1.
    """
    if _Thread.jobs is None or _Thread.thread is None:
        return
    _Thread.jobs.put(None)
    failed = hasattr(sys, "last_type")  # the interpreter has printed an uncaught error
    if not failed:
        _Thread.thread.join(LEAVE_SECONDS)
    if failed or _Thread.thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# At import, so that exit functions of other modules, which are registered later, run before.
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
        except BaseException as error:  # raised again by `result`
            failure, failed_at = error, errors_seen
            future.set_exception(error)
        # Free the tensors before the wait for the next job.
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
