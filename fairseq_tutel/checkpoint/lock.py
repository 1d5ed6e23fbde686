"""Locks a folder, so that only one training run at a time writes to the folder.

The operating system holds the lock, and frees the lock when the process ends, also after a kill.
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
    """Context manager that locks a folder for writing, and creates the folder if it is missing.

    The lock file is removed at the end. The yielded value is False if the file system has no locks.

    Raises:
        ValueError: another process holds the lock on the folder.
        OSError: the lock file cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    with contextlib.ExitStack() as stack:
        while True:
            # Without O_NONBLOCK, opening a pipe with this name could block.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, file)
            with contextlib.suppress(OSError):  # The file of a killed run may have another owner.
                os.fchmod(file, 0o666)  # All users may lock the folder.
            is_locked = _lock(file, folder)
            if os.fstat(file).st_nlink:  # A run that just ended may have removed the file.
                break
        try:
            yield is_locked
        finally:
            with contextlib.suppress(OSError):  # The folder may have another owner.
                os.remove(path)


def _lock(file: int, folder: str) -> bool:
    try:
        # Unlike `flock`, lockf locks are not inherited by data loader workers, which may outlive the run.
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
