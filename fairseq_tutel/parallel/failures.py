"""Ends all ranks within seconds after a rank has failed, with a sentence that names the failed rank.

The rendezvous store keeps the first failure of a job under one key. A rank with an error writes the key
itself. If a rank is killed, another rank of its machine writes it, because the kernel reports the end of a
process without delay. A thread of every rank reads the key, because the main thread may wait in C code for
a collective.
"""

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from fairseq_tutel.files import error_line

FAILED = "fairseq_tutel/failed"
PROCESSES = "fairseq_tutel/processes"
POLL_SECONDS = 1.0
# The time that the main thread has to end this process with an error.
GRACE_SECONDS = 2.0
# The time limit of one check of the store. Requests to a store whose process is stopped never return.
LOOK_SECONDS = 2.0
# The longest time from an error of this rank to the end of its process.
END_SECONDS = 10.0
SHOWN_CHARACTERS = 300
NEVER = float("inf")
# The environment variable with the path of torchrun's file for a rank's error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def publish(store: dist.Store, failure: str) -> None:
    """Write a failure, a clause such as "rank 1 failed: …", to the store, unless the store has one."""
    store.compare_set(FAILED, "", failure)


def published(store: dist.Store) -> str:
    """Return the failure in the store; "" if there is none."""
    return store.get(FAILED).decode() if store.check([FAILED]) else ""


def keeps_the_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher, not rank 0, runs the rendezvous store.

    A launcher may restart ranks with the same store.
    """
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def no_store() -> str:
    """Return a clause for a rendezvous store that does not answer."""
    keeper = "the launcher" if keeps_the_store() else "rank 0"
    return f"{keeper}, which runs the rendezvous store, has ended or is stopped; look at its log"


def write_for_torchrun(line: str) -> None:
    """Write an error line to the file that torchrun reads, so that torchrun's summary has this line."""
    if path := os.environ.get(ERROR_FILE):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)


def end_process(sentence: str, code: int = 1, publishes: str = "") -> NoReturn:
    """Print an error and end this process, from any thread, even if the error cannot be printed.

    `publishes`: what this rank did, such as "received SIGTERM", so that the other ranks name this reason.
    """
    try:
        if publishes and _watch is not None:
            _watch.publish(publishes)
        line = error_line(sentence)
        write_for_torchrun(line)
        os.write(2, f"{line}\n".encode())  # the main thread may hold the lock of sys.stderr
    finally:
        os._exit(code)


def look() -> str:
    """Return the job's first failure, or "" if there is none or this process has no watch."""
    return "" if _watch is None else _watch.look()


class FailureWatch:
    """A thread that ends this process if a rank of the job has failed.

    Args:
        store: the rendezvous store, with the extended API; the thread uses its own connection.
        rank: this rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        global _watch
        self._store, self._rank = store.clone(), rank
        self._failure, self._own_error = "", ""
        self._is_closing = False
        self._due = NEVER  # when the thread ends this process
        self._lock = threading.Lock()  # the thread holds the lock while it ends this process
        self._wakes = threading.Event()
        self._has_looked = threading.Event()
        # Every process of a machine appends "rank:PID" to one key, and "rank:0" before an ordinary end.
        self._key = f"{PROCESSES}/{_machine()}"
        self._store.append(self._key, f"{rank}:{os.getpid()} ")
        self._thread = threading.Thread(target=self._run, name="failures", daemon=True)
        self._thread.start()
        _watch = self

    def look(self) -> str:
        """Make the thread check for a failure immediately, and return it; see the function `look`."""
        # A check that has already started may end before this request, so two checks are awaited.
        for _ in range(2):
            self._has_looked.clear()
            self._wakes.set()
            self._has_looked.wait(LOOK_SECONDS)
        return self._failure

    def report(self, error: BaseException) -> None:
        """Report an error of this rank to all ranks; the process must end now, within END_SECONDS."""
        text = next(iter(str(error).splitlines()), "")[:SHOWN_CHARACTERS].removeprefix("error: ")
        is_sentence = isinstance(error, SystemExit) and isinstance(error.code, str) and text
        name = "" if is_sentence else type(error).__name__
        self.publish(f"failed: {': '.join(filter(None, (name, text)))}")

    def publish(self, own_error: str) -> None:
        """Publish what this rank did, such as "failed: …"; the process must end now, within END_SECONDS."""
        with self._lock:
            self._own_error = own_error
            self._due = time.monotonic() + END_SECONDS
        self.look()
        if self._rank == 0 and dist.get_world_size() > 1 and not keeps_the_store():
            time.sleep(POLL_SECONDS + LOOK_SECONDS / 4)  # the other ranks read from this process

    def close(self) -> None:
        """Announce the ordinary end of this process, unless the store has ended, and end the thread."""
        global _watch
        _watch = None
        self._is_closing = True
        self._wakes.set()
        self._thread.join(LOOK_SECONDS)

    def _run(self) -> None:
        while True:
            self._wakes.wait(max(0.0, min(POLL_SECONDS, self._due - time.monotonic())))
            self._wakes.clear()
            if self._is_closing:
                with contextlib.suppress(Exception):  # rank 0, which runs the store, may have ended
                    self._store.append(self._key, f"{self._rank}:0 ")
                return
            try:
                self._failure = self._failure or self._find()
            except dist.DistNetworkError:
                self._failure = no_store()
            except Exception:  # for example a slow store: check again
                pass
            if self._failure and not self._own_error:
                self._due = min(self._due, time.monotonic() + GRACE_SECONDS)
            self._has_looked.set()
            if time.monotonic() >= self._due and not self._is_closing:
                self._end()

    def _find(self) -> str:
        if self._own_error:
            publish(self._store, f"rank {self._rank} {self._own_error.rstrip('.')}")
        ended = [rank for rank, process in self._processes().items() if process and _has_ended(process)]
        # A rank may have announced its end after the first read.
        processes = self._processes() if ended else {}
        for rank in filter(processes.get, ended):
            publish(
                self._store,
                f"rank {rank} ended without an error message, as after SIGKILL or a crash; look at its log "
                "and at the kernel's log",
            )
        return published(self._store)

    def _processes(self) -> dict[int, int]:
        """Return the process IDs of this machine's ranks; 0 for a rank that is about to end normally."""
        entries = self._store.get(self._key).decode().split()
        return {int(rank): int(process) for rank, _, process in (entry.partition(":") for entry in entries)}

    def _end(self) -> None:
        with self._lock:
            if self._own_error and time.monotonic() < self._due:
                return  # the main thread has reported its own error meanwhile
            if self._own_error:
                end_process(f"rank {self._rank} could not end within {END_SECONDS:g} s after its error.")
            end_process(f"rank {self._rank} ends, because {self._failure}.")


_watch: FailureWatch | None = None


def _machine() -> str:
    """Return a name that is equal for all processes that can see each other's process IDs."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"process {os.getpid()}"


def _has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended; False if the system cannot tell."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    try:
        return bool(select.select([handle], [], [], 0)[0])  # also if its parent has not waited for it
    finally:
        os.close(handle)
