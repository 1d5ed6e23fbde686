"""Finds TCP ports that stay unused until the first rank listens on them.

The system may use any free port from 32768 on for an outgoing connection. Other programs use a port below
32768 only if they name the port, and fairseq draws ports from 10000 to 20000.
"""

import itertools
import os
import socket

FIRST, PER_WORKER, WORKERS = 20_000, 3_000, 4
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
# The search starts at the process ID, so another test run on this machine most likely uses other ports.
_ports = (FIRST + PER_WORKER * _worker + i % PER_WORKER for i in itertools.count(os.getpid()))


def free_port() -> int:
    """Return an unused TCP port that no earlier call returned."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
