"""Creates and renews a lease, a file that names the only run that may write to its folder.

On the same machine, a run has ended if its process has ended. On another machine, a run has ended if its
lease is stale. Clocks of machines are not compared: all file times come from the file system.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass

from fairseq_tutel.checkpoint.atomic_save import replacing
from fairseq_tutel.files.atomic import renamed_when_whole, temporary_beside
from fairseq_tutel.files.untrusted import content_and_time, parse_json

logger = logging.getLogger(__name__)

NAME = "writer.lease"
RENEW_SECONDS = 15.0
# A lease is stale after this time. A writer may be unable to renew its lease while a disk hangs.
STALE_SECONDS = 120.0
POLL_SECONDS = 0.5
# Two processes that replace the same stale lease do so within this time; the last process has the lease.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Writer:
    """Identifies the process that holds a lease and may write to the folder."""

    host: str
    pid: int
    machine: str  # identifies machine, boot and container; "" if unknown
    started: str  # start time in clock ticks of the system
    token: str  # identifies the lease

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_alive(self) -> bool | None:
        """Return whether the process still runs, or None if unknown, as on another machine."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # the process belongs to another user
            pass
        started = _started(self.pid)
        return started is None or started == self.started


def this_process() -> Writer:
    """Return a `Writer` that identifies the current process, with a new random token."""
    pid = os.getpid()
    return Writer(socket.gethostname(), pid, _machine(), _started(pid) or "", token=secrets.token_hex(4))


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a process, "" if the process has ended, or None if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]


def read(path: str) -> tuple[Writer | None, float]:
    """Read a lease; return its holder, or None if it is invalid or missing, and its last renewal time."""
    try:
        # A network file system queries its server when a file is opened.
        content, renewed = content_and_time(path)
        writer = Writer(**parse_json(content))
        valid = type(writer.pid) is int and 0 < writer.pid < 2**31
        return writer if valid else None, renewed
    except (FileNotFoundError, ValueError, TypeError):
        return None, 0.0
    except OSError as error:
        if error.errno:
            raise
        raise OSError(f"{path} is not a lease ({error}); remove this file.") from error


def take(folder: str) -> "Lease":
    """Create a folder if it is missing, and take its lease; raise ValueError if another run holds it."""
    os.makedirs(folder, exist_ok=True)
    path, own = os.path.join(folder, NAME), this_process()
    with temporary_beside(path) as written:
        _write(own, written)
        now = os.stat(written).st_mtime
        with contextlib.suppress(OSError):  # a lease exists, or links are not supported
            os.link(written, path)
            return Lease(path, own)
    # While this process waits, it has no temporary file, because a killed process would leave the file.
    after = _wait_until_gone(path, now)
    with renamed_when_whole(path) as written:
        _write(own, written)
    time.sleep(SETTLE_SECONDS)
    holder, _ = read(path)
    if holder != own:
        raise ValueError(_refusal(path, holder))
    return Lease(path, own, after)


def _write(writer: Writer, path: str) -> None:
    with open(path, "w") as file:
        json.dump(asdict(writer), file)


def _wait_until_gone(path: str, now: float) -> Writer | None:
    """Wait until a lease is released or stale; if it is stale, return its holder.

    Returns None if the lease was released or belongs to this process. Raises ValueError if the writer still
    runs or renews the lease. `now` is the time on the clock of the file system.
    """
    begin, first = time.monotonic(), None
    while True:
        writer, renewed = read(path)
        if writer is None:
            return None
        alive = writer.is_alive()
        if alive and writer.pid == os.getpid():
            return None
        if alive or first not in (None, (writer, renewed)):
            raise ValueError(_refusal(path, writer))
        silent = now - renewed + time.monotonic() - begin
        if alive is False or silent > STALE_SECONDS:
            return writer
        if first is None:
            left = STALE_SECONDS - silent
            logger.info(
                "--save-dir has a lease of %s; waiting up to %.0f s to see if it is renewed", writer, left
            )
        first = writer, renewed
        time.sleep(POLL_SECONDS)


def _refusal(path: str, writer: Writer | None) -> str:
    return (
        f"--save-dir is {os.path.dirname(path)}, where {writer or 'another process'} is training; give "
        "another --save-dir, or end that process first."
    )


class Lease:
    """A lease that this process holds; a background thread renews it until `release` is called."""

    def __init__(self, path: str, own: Writer, after: Writer | None = None) -> None:
        self.path, self.own = path, own
        self.after = after  # an earlier writer that ended without releasing it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Raise ValueError if another training run took the lease; call this before each write."""
        try:
            holder, _ = read(self.path)
        except OSError:  # the write will raise the same error
            return
        if holder is None:  # the folder was cleared
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with replacing(self.path) as written:
                _write(self.own, written)
        elif holder != self.own:
            raise ValueError(
                f"--save-dir is {os.path.dirname(self.path)}, which {holder} has taken over because this "
                f"process did not renew its lease for {STALE_SECONDS:.0f} s; this run no longer writes to "
                "the folder; end one of the two training runs."
            )

    def is_held(self) -> bool:
        """Return whether the lease's file still names this process."""
        return read(self.path)[0] == self.own

    def release(self) -> None:
        """Stop renewing the lease, and delete its file."""
        self._ended.set()
        self._thread.join(RENEW_SECONDS)  # the disk may hang
        with contextlib.suppress(OSError):
            if self.is_held():
                os.remove(self.path)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                if self.is_held():
                    os.utime(self.path)
