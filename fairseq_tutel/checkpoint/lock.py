"""Locks a folder, so that only one training run writes to it.

The operating system holds the lock and frees it when the process ends, also after a kill.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator

logger = logging.getLogger(__name__)

NAME = "writer.lock"


@contextlib.contextmanager
def locked(folder: str) -> Iterator[bool]:
    """Context manager that locks a folder for writing; it creates a missing folder.

    The lock's file is removed at the end. Yields False, after a warning, if the file system has no locks.

    Raises:
        ValueError: another process holds the lock.
        OSError: the file cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    with contextlib.ExitStack() as stack:
        while True:
            # Without O_NONBLOCK, opening a pipe would block until another process opens it.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, file)
            with contextlib.suppress(OSError):  # another user owns the file of a killed run
                os.fchmod(file, 0o666)  # users who may write to the folder may lock it
            is_locked = _lock(file, folder)
            if os.fstat(file).st_nlink:  # 0: an ending run has just removed the file
                break
        try:
            yield is_locked
        finally:
            with contextlib.suppress(OSError):  # another user owns the folder
                os.remove(path)


def _lock(file: int, folder: str) -> bool:
    try:
        # Unlike `flock`, this is not inherited by data loader workers, which can outlive a killed run.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning(
                "--save-dir is %s, whose file system has no locks (%s); do not start a second run there",
                folder,
                error.strerror,
            )
            return False
        writer = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"--save-dir is {folder}, where {writer} is training; give another --save-dir, or end that "
            "process first."
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True
