"""Receives signals that ask this process to save its work and end, such as SIGTERM before a preemption.

A launcher also sends SIGTERM after one rank has failed. The failure watch then ends this process.

Python calls a signal handler only in the main thread, which may wait in a collective. Therefore a thread
reads the numbers of received signals from a socket. The thread ends the process after a time limit.
"""

import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from fairseq_tutel.parallel import failures

logger = logging.getLogger(__name__)

# A run that saved its work after a signal exits with EX_TEMPFAIL ("try again later") of sysexits.h.
EXIT_CODE = 75
# Signals within this time count as one, because a process may get a signal directly and from a launcher.
MERGE_SECONDS = 1.0
# Reading this number from the socket ends the thread. No signal has this number.
CLOSE = 0
SAVES, HAS_NOTHING = "all ranks will save", "there is nothing to save before the first update"
# Only these handlers are replaced, so the handlers of other libraries are kept.
OF_PYTHON = (signal.SIG_DFL, signal.default_int_handler)


class SignalWatch:
    """Context manager that records the first signal, and ends the process if it does not end in time.

    A second signal, more than MERGE_SECONDS after the first signal, ends the process at once. Forked child
    processes, such as data loaders, ignore the signals, except a SIGTERM from this process. If other code
    has set a handler for a signal, the existing handler is kept.

    Args:
        names: names of signals, such as SIGTERM.
        seconds: the time from the first signal to the end of the process.
        forwards: whether to send the signals to child processes and to end after the children.
    """

    def __init__(self, names: Iterable[str], seconds: float, forwards: bool = False) -> None:
        self.received: str | None = None  # The name of the first signal.
        self.seconds, self._forwards = seconds, forwards
        self._begin, self._has_work = 0.0, False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        numbers = [signal.Signals[name] for name in names]
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno())
        self._before: dict[int, Any] = {
            number: signal.signal(number, _no_action)
            for number in numbers
            if signal.getsignal(number) in OF_PYTHON
        }
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        in_child = weakref.WeakMethod(self._shield_child)
        os.register_at_fork(after_in_child=lambda: (method := in_child()) and method())

    @property
    def elapsed(self) -> float:
        """The seconds since the first signal, or 0 without a signal."""
        return time.monotonic() - self._begin if self.received else 0.0

    def begin_work(self) -> None:
        """Record that from now on the process has work to save."""
        self._has_work = True

    def __enter__(self) -> "SignalWatch":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Restore the handlers. After a signal, this process ignores further signals while it ends."""
        # If another rank received the signal, this process also exits with EXIT_CODE and ignores signals.
        is_ending = isinstance(error, SystemExit) and error.code == EXIT_CODE
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if is_ending or self.received else before)
        signal.set_wakeup_fd(self._descriptor)
        self._before = {}
        self._writer.send(bytes([CLOSE]))
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        while True:
            left = None if self.received is None or self._forwards else self.seconds - self.elapsed
            if left is not None and left <= 0:
                self._end(f"could not end within {self.seconds:g} s (--moe-preemption-seconds)")
            ready = select.select([self._reader], [], [], left)[0]
            for number in self._reader.recv(64) if ready else b"":
                if number == CLOSE:
                    return
                if number in self._before:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        name = signal.Signals(number).name
        is_first = self.received is None
        if is_first:
            self._begin, self.received = time.monotonic(), name
        if self._forwards:
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    os.kill(child.pid, number)
            logger.warning("received %s, and sent it to the ranks that this process started", name)
        elif is_first:
            if failures.look():
                return
            logger.warning(
                "received %s: %s; this process ends within %g s, or at once after another signal",
                *(name, SAVES if self._has_work else HAS_NOTHING, self.seconds),
            )
        elif self.elapsed > MERGE_SECONDS:
            self._end(f"then received {name}")

    def _end(self, reason: str) -> None:
        assert self.received is not None
        lost = "the newest saved checkpoint is complete" if self._has_work else "there was nothing to save"
        failures.end_process(
            f"this process received {self.received} and {reason}; {lost}.",
            128 + signal.Signals[self.received] if self._has_work else EXIT_CODE,
            publishes=f"received {self.received} and {reason}",
        )

    def _shield_child(self) -> None:
        """Ignore the signals in a forked child, except a SIGTERM from its parent.

        Schedulers send signals to all processes, but a rank needs its data loaders to finish its update.
        """
        if not self._before:
            return
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if signal.SIGTERM in self._before:
            # torch replaces the handlers in its data loading processes, but does not unblock signals.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey_parent, args=(os.getppid(),), daemon=True).start()


def _obey_parent(parent: int) -> None:
    """Wait for SIGTERM. End this process if its parent sent the signal or has ended."""
    while True:
        info = signal.sigwaitinfo({signal.SIGTERM})
        if info.si_pid == parent or os.getppid() != parent:
            os._exit(0)


def _no_action(number: int, frame: Any) -> None:
    """Do nothing, because the thread of `SignalWatch` acts on the signal."""
