"""A lease: one training writes into a folder, and a file there that it renews says which one.

A writer that ended on this machine is known by its process; one of another machine by a lease that is no
longer renewed. Clocks are not compared between machines: the times of files are those of the file system.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from fairseq_tutel.checkpoint.files import replacing, temporary_of
from fairseq_tutel.files.small import content_and_time, parse_json

logger = logging.getLogger(__name__)

NAME = "writer.lease"
RENEW_SECONDS = 15.0
# So long a living writer may not come to renew it, for a disk that hangs.
STALE_SECONDS = 120.0
POLL_SECONDS = 0.5
# Two that found the same lease left behind write theirs within this; the last one has it.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Writer:
    """A process that writes.

    Attributes:
        host: its machine's name.
        pid: its number there.
        machine: what tells machines, their starts and their containers apart; empty where nothing does.
        started: when it started there, in the system's own count.
        token: of this lease.
    """

    host: str
    pid: int
    machine: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_alive(self) -> bool | None:
        """Whether it still runs; None where this machine cannot know."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is another user's
            pass
        started = _started(self.pid)
        return started is None or started == self.started


def this_process() -> Writer:
    """Return the process that asks, with a new token."""
    pid = os.getpid()
    return Writer(
        socket.gethostname(), pid, _machine(), _started(pid) or "", token=secrets.token_hex(4)
    )


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def _started(pid: int) -> str | None:
    """Return when a process started, "" for one that has ended, None where that is not to be seen."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]


def read(path: str) -> tuple[Writer | None, float]:
    """Return who holds a lease, and when it was last renewed; None for nobody, or no lease of ours."""
    try:
        # Opening it makes a network's file system look at its server.
        content, renewed = content_and_time(path)
        writer = Writer(**parse_json(content))
        valid = type(writer.pid) is int and 0 < writer.pid < 2**31
        return writer if valid else None, renewed
    except (FileNotFoundError, ValueError, TypeError):
        return None, 0.0
    except OSError as error:
        if error.errno:
            raise
        raise OSError(f"{path} is no lease: {error}; remove it.") from error


def take(folder: str) -> "Lease":
    """Take the lease of a folder, which is made; waits for as long as another's may still be renewed.

    Raises:
        ValueError: another training writes there.
        OSError: the lease could not be written.
    """
    os.makedirs(folder, exist_ok=True)
    path, own = os.path.join(folder, NAME), this_process()
    with _written(own, path) as written:
        if _link(written, path):
            return Lease(path, own)
        now = os.stat(written).st_mtime
    # No file of this process is there while it waits: it may be killed meanwhile.
    after = _wait_until_gone(path, now)
    with _written(own, path) as written:
        os.replace(written, path)
    time.sleep(SETTLE_SECONDS)
    holder, _ = read(path)
    if holder != own:
        raise ValueError(_refusal(path, holder))
    return Lease(path, own, after)


@contextlib.contextmanager
def _written(writer: Writer, path: str) -> Iterator[str]:
    """Give the block a file with a lease; a training removes those that a kill left (`is_temporary`)."""
    temporary = temporary_of(path)
    try:
        _write(writer, temporary)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _write(writer: Writer, path: str) -> None:
    with open(path, "w") as file:
        json.dump(asdict(writer), file)


def _link(written: str, path: str) -> bool:
    """Give a lease its name where there is none; False where there is one, or the disk knows no links."""
    try:
        os.link(written, path)
    except OSError:
        return False
    return True


def _wait_until_gone(path: str, now: float) -> Writer | None:
    """Return the writer that left its lease behind; None where it was released, or is this process's.

    Args:
        path: of the lease.
        now: by the file system's clock.

    Raises:
        ValueError: a writer runs, or renews its lease.
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
            logger.info(
                "--save-dir has a lease of %s; waiting up to %.0f s to see whether it is renewed",
                writer,
                STALE_SECONDS - silent,
            )
        first = writer, renewed
        time.sleep(POLL_SECONDS)


def _refusal(path: str, writer: Writer | None) -> str:
    return (
        f"--save-dir is {os.path.dirname(path)}, where {writer or 'another process'} is training; give "
        "another --save-dir, or end that one first."
    )


class Lease:
    """What this process holds, and renews beside its work until it is released.

    Args:
        path: of its file.
        own: this process.
        after: the writer that ended without releasing it; None for none.
    """

    def __init__(self, path: str, own: Writer, after: Writer | None = None) -> None:
        self.path, self.own, self.after = path, own, after
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Look before a write whether the lease is still this process's.

        Raises:
            ValueError: it was not renewed for so long that another training has taken it.
        """
        try:
            holder, _ = read(self.path)
        except OSError:  # what is to be written will say so
            return
        if holder is None:  # somebody cleared the folder
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with replacing(self.path) as written:
                _write(self.own, written)
        elif holder != self.own:
            raise ValueError(
                f"--save-dir is {os.path.dirname(self.path)}, which {holder} has taken over, since this "
                f"process did not run for {STALE_SECONDS:.0f} s; nothing more is written here: end one of "
                "the two trainings."
            )

    def release(self) -> None:
        """Let the next one write."""
        self._ended.set()
        self._thread.join(RENEW_SECONDS)  # a disk may hang
        with contextlib.suppress(OSError):
            if read(self.path)[0] == self.own:
                os.remove(self.path)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                if read(self.path)[0] == self.own:
                    os.utime(self.path)
