"""Run communication in parallel to computation, in a thread on a CPU or on another stream on a GPU.

A process has only one communication thread, so collectives start in the same order on every rank.
"""

import atexit
import functools
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
    """Run `function(rows)` in the background without autograd. Return a function that awaits the result.

    On a CPU, waiting blocks the calling thread. On a GPU, waiting blocks the current stream. After one
    function has failed in the thread, all later functions fail without being called. Otherwise, a peer
    would mistake rows of a later function for rows of the failed function.
    """
    if rows.is_cuda:
        return _start_on_stream(function, rows)
    global _worker
    if _worker is None or not _worker.is_alive():  # A forked process does not have its parent's thread.
        _worker = _Worker()
    future = Future[Tensor]()
    _worker.jobs.put((function, rows, future))
    return future.result


class _Worker(threading.Thread):
    """The communication thread. It is a daemon, because it may wait forever for a peer that has failed."""

    def __init__(self) -> None:
        super().__init__(name="communication", daemon=True)
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        failure: BaseException | None = None
        while (job := self.jobs.get()) is not None:
            function, rows, future = job
            try:
                if failure is not None:
                    raise failure
                with torch.no_grad():
                    future.set_result(function(rows))
            except BaseException as error:  # `future.result` raises the error again.
                failure = error
                future.set_exception(error)
            # Free the tensors of a job before waiting for the next job.
            del job, function, rows, future


_worker: _Worker | None = None


def _leave() -> None:
    """End the communication thread before the interpreter exits; after an error, exit with status 1.

    After an error, the communication thread or a gloo thread may still wait for a peer. A waiting thread
    would abort the process at interpreter exit, and a launcher would report a crash.
    """
    if _worker is None:
        return
    _worker.jobs.put(None)
    failed = hasattr(sys, "last_type")  # The interpreter sets last_type at an uncaught error.
    if not failed:
        _worker.join(LEAVE_SECONDS)
    if failed or _worker.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_leave)


# With the default priority, the GPU would start the next chunk's experts before this chunk's combine.
_exchange_stream = functools.cache(lambda device: torch.cuda.Stream(device, priority=-1))
_waiting_stream = functools.cache(lambda device: torch.cuda.Stream(device))


def free_after(work: Any, sent: Tensor) -> None:
    """Let torch reuse the memory of a sent tensor as soon as its collective has finished.

    NCCL's work handle keeps its tensors until a stream waits for the handle. A separate stream waits,
    because a wait of the computation's stream could delay later sends.
    """
    if sent.is_cuda:
        stream = _waiting_stream(sent.device)
        with torch.cuda.stream(stream):
            work.wait()
        sent.record_stream(stream)


def _start_on_stream(function: Callable[[Tensor], Tensor], rows: Tensor) -> Wait:
    stream = _exchange_stream(rows.device)
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
