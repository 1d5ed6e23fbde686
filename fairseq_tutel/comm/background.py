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
    global _worker
    if _worker is None or not _worker.is_alive():  # not in a forked process
        _worker = _Worker()
    return _InThread(_worker, function, rows)


class _Worker(threading.Thread):
    """The communication thread. A daemon: after an error elsewhere it may wait for a peer forever."""

    def __init__(self) -> None:
        super().__init__(name="communication", daemon=True)
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.errors_seen = 0
        self.start()

    def run(self) -> None:
        failure: BaseException | None = None
        failed_at = -1
        while (job := self.jobs.get()) is not None:
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


_worker: _Worker | None = None


class _InThread:
    def __init__(self, worker: _Worker, function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        self.worker = worker
        self.future: Future[Tensor] = Future()
        worker.jobs.put((function, rows, self.future, worker.errors_seen))

    def result(self) -> Tensor:
        try:
            return self.future.result()
        except BaseException:
            self.worker.errors_seen += 1
            raise


def _leave() -> None:
    """End the thread before the interpreter exits, or the process with status 1.

    After an error, this thread or one of gloo may still wait for a peer. At interpreter exit that aborts
    the process, which a launcher would report as a crash.
    """
    if _worker is None:
        return
    _worker.jobs.put(None)
    failed = hasattr(sys, "last_type")  # the interpreter has printed an uncaught error
    if not failed:
        _worker.join(LEAVE_SECONDS)
    if failed or _worker.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# At import, so that exit functions of other modules, which are registered later, run before.
atexit.register(_leave)


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
