"""The failure watch ends all ranks within seconds after a rank fails, and names the failed rank.

The rendezvous store keeps the first failure of a job under one key, the failure key. A rank with an error
writes the failure key itself. If a rank is killed, another rank of the same machine writes the failure key.
The kernel reports the end of a process without delay. On every rank, a thread reads the failure key,
because the main thread may wait in C code for a collective.
"""

import contextlib
import json
import os
import select
import threading
import time
from typing import Any, NoReturn

import torch.distributed as dist

from fairseq_tutel.files import error_line

FAILED = "fairseq_tutel/failed"
PROCESSES = "fairseq_tutel/processes"
POLL_SECONDS = 1.0
# After a failure of another rank, the main thread has this time to end its process with an error.
GRACE_SECONDS = 2.0
# A check of the store may take up to this time. Requests to a store whose process is stopped never return.
LOOK_SECONDS = 2.0
# A rank's process ends at most this time after the rank has reported an error.
END_SECONDS = 10.0
SHOWN_CHARACTERS = 300
NEVER = float("inf")
# This environment variable has the path of the file in which torchrun expects a rank's error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def publish(store: dist.Store, failure: str) -> None:
    """Write a failure, a clause such as "rank 1 failed: …", to the store if the store has no failure."""
    store.compare_set(FAILED, "", failure)


def published(store: dist.Store) -> str:
    """Return the job's first failure from the store, or "" if the store has no failure."""
    return store.get(FAILED).decode() if store.check([FAILED]) else ""


def keeps_the_store() -> bool:
    """Return whether the launcher, not rank 0, runs the rendezvous store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def no_store() -> str:
    """Return a clause for error messages that explains why the rendezvous store does not answer."""
    keeper = "the launcher" if keeps_the_store() else "rank 0"
    return f"{keeper}, which runs the rendezvous store, has ended or is stopped; look at its log"


def write_for_torchrun(line: str) -> None:
    """Write an error line to torchrun's error file, so that torchrun's summary shows this line."""
    if path := os.environ.get(ERROR_FILE):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)


def end_process(sentence: str, code: int = 1, publishes: str = "") -> NoReturn:
    """Print an error and end this process from any thread, even if printing fails.

    `publishes` is a reason such as "received SIGTERM", which the other ranks' errors name.
    """
    try:
        if publishes and _watch is not None:
            _watch.publish(publishes)
        line = error_line(sentence)
        write_for_torchrun(line)
        os.write(2, f"{line}\n".encode())  # The main thread may hold sys.stderr's lock.
    finally:
        os._exit(code)


def look() -> str:
    """Return the job's first failure, or "" if there is no failure or no failure watch."""
    return "" if _watch is None else _watch.look()


class FailureWatch:
    """A thread that ends this process if a rank of the job has failed.

    Args:
        store: a rendezvous store with torch's extended API. The thread opens a second connection to it.
        rank: this rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        global _watch
        self._store, self._rank = store.clone(), rank
        self._failure, self._own_error = "", ""
        self._is_closing = False
        self._due = NEVER  # The time when the thread ends this process.
        self._lock = threading.Lock()  # The thread holds this lock while it ends this process.
        self._wakes = threading.Event()
        self._has_looked = threading.Event()
        # Every process of a machine appends "rank:PID" to this key, and "rank:0" before an ordinary end.
        self._key = f"{PROCESSES}/{_machine()}"
        self._store.append(self._key, f"{rank}:{os.getpid()} ")
        self._thread = threading.Thread(target=self._run, name="failures", daemon=True)
        self._thread.start()
        _watch = self

    def look(self) -> str:
        """Make the thread check for a failure immediately, and return the failure or ""."""
        # A check that has already started may miss a newer failure, so this method waits for two checks.
        for _ in range(2):
            self._has_looked.clear()
            self._wakes.set()
            self._has_looked.wait(LOOK_SECONDS)
        return self._failure

    def report(self, error: BaseException) -> None:
        """Report an error of this rank to all ranks. The process must end within END_SECONDS."""
        text = next(iter(str(error).splitlines()), "")[:SHOWN_CHARACTERS].removeprefix("error: ")
        is_sentence = isinstance(error, SystemExit) and isinstance(error.code, str) and text
        name = "" if is_sentence else type(error).__name__
        self.publish(f"failed: {': '.join(filter(None, (name, text)))}")

    def publish(self, own_error: str) -> None:
        """Publish why this rank ends, such as "failed: …". The process must end within END_SECONDS."""
        with self._lock:
            self._own_error = own_error
            self._due = time.monotonic() + END_SECONDS
        self.look()
        if self._rank == 0 and dist.get_world_size() > 1 and not keeps_the_store():
            time.sleep(POLL_SECONDS + LOOK_SECONDS / 4)  # Other ranks still read this process's store.

    def close(self) -> None:
        """Announce the ordinary end of this process, unless the store has ended, and stop the thread."""
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
                with contextlib.suppress(Exception):  # Rank 0 runs the store and may have ended.
                    self._store.append(self._key, f"{self._rank}:0 ")
                return
            try:
                self._failure = self._failure or self._find()
            except dist.DistNetworkError:
                self._failure = no_store()
            except Exception:  # The store may be slow, so check again.
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
        # A rank may have announced its ordinary end after the first read of process IDs.
        processes = self._processes() if ended else {}
        for rank in filter(processes.get, ended):
            publish(
                self._store,
                f"rank {rank} ended without an error message, as after SIGKILL or a crash; look at its log "
                "and at the kernel's log",
            )
        return published(self._store)

    def _processes(self) -> dict[int, int]:
        """Return the process IDs of this machine's ranks, or 0 for a rank that is about to end normally."""
        entries = self._store.get(self._key).decode().split()
        return {int(rank): int(process) for rank, _, process in (entry.partition(":") for entry in entries)}

    def _end(self) -> None:
        with self._lock:
            if self._own_error and time.monotonic() < self._due:
                return  # The main thread has reported an error meanwhile.
            if self._own_error:
                end_process(f"rank {self._rank} could not end within {END_SECONDS:g} s after its error.")
            end_process(f"rank {self._rank} ends, because {self._failure}.")


_watch: FailureWatch | None = None


def _machine() -> str:
    """Return a machine name that is equal for processes that can see each other's process IDs."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"process {os.getpid()}"


def _has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended, or False if the system cannot tell."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    try:
        return bool(select.select([handle], [], [], 0)[0])  # A zombie process counts as ended.
    finally:
        os.close(handle)
