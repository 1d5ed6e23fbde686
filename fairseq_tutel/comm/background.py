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
from typing import Any

import torch
from torch import Tensor

LEAVE_SECONDS = 1.0


Wait = Callable[[], Tensor]


def start(function: Callable[[Tensor], Tensor], rows: Tensor) -> Wait:
    """Begin `function(rows)`, without autograd, and return a function that waits for its result.

    It waits on this thread or on this stream. After a failure, queued jobs fail without sending: a peer
    would take their rows for those of the failed job. Jobs that start after the error was raised run again.
    """
    if rows.is_cuda:
        return _start_on_stream(function, rows)
    global _worker
    if _worker is None or not _worker.is_alive():  # not in a forked process
        _worker = _Worker()
    worker, future = _worker, Future[Tensor]()
    worker.jobs.put((function, rows, future, worker.errors_seen))

    def wait() -> Tensor:
        try:
            return future.result()
        except BaseException:
            worker.errors_seen += 1
            raise

    return wait


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
            except BaseException as error:  # raised again by the wait
                failure, failed_at = error, errors_seen
                future.set_exception(error)
            # Free the tensors before the wait for the next job.
            del job, function, rows, future


_worker: _Worker | None = None


def _leave() -> None:
    """End the thread before the interpreter exits, or after an error end the process with status 1.

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


_streams: dict[torch.device, Any] = {}


def _start_on_stream(function: Callable[[Tensor], Tensor], rows: Tensor) -> Wait:
    if rows.device not in _streams:
        _streams[rows.device] = torch.cuda.Stream(rows.device)
    stream = _streams[rows.device]
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream), torch.no_grad():
        rows.record_stream(stream)
        out = function(rows)
        done = torch.cuda.Event()
        done.record(stream)

    def wait() -> Tensor:
        current = torch.cuda.current_stream(out.device)
        current.wait_event(done)
        out.record_stream(current)
        return out

    return wait
