"""Finds TCP ports for ranks, such that no other program uses a port before the first rank listens on it.

The system may give any port from 32768 on to an outgoing connection, even a port that was just found free.
A port below 32768 is used only if a program names it. fairseq draws random ports from 10000 to 20000.
"""

import itertools
import os
import socket

FIRST, PER_WORKER, WORKERS = 20_000, 3_000, 4
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
# Start at the process ID, so another test run on this machine most likely uses other ports.
_ports = (FIRST + PER_WORKER * _worker + i % PER_WORKER for i in itertools.count(os.getpid()))


def free_port() -> int:
    """Return an unused TCP port; each call returns a different port."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
