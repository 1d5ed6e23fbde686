"""Replaces stderr by a pseudo-terminal, to test output that is printed only on a terminal."""

import contextlib
import os
import pty
import select
import sys
import termios
from unittest import mock

from fairseq_tutel.parallel import progress


@contextlib.contextmanager
def terminal(delay=0.0):
    """Make stderr a terminal, with progress bars after `delay` seconds; yield a function that returns the
    new output."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    with (
        os.fdopen(follower, "w") as stderr,
        mock.patch.object(sys, "stderr", stderr),
        mock.patch.object(progress, "DELAY_SECONDS", delay),
    ):

        def drawn():
            stderr.flush()
            found = b""
            while select.select([leader], [], [], 0)[0]:
                found += os.read(leader, 65536)
            return found.decode()

        yield drawn
    os.close(leader)
