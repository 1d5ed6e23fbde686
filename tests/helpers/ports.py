"""TCP ports for ranks: a test run must not lose one to another before its first rank listens on it.

Whatever connects may get any port from 32768 on, the one included that a probe has just found free. Ports
below that go to those alone who name them; fairseq draws some from 10000 to 20000.
"""

import itertools
import os
import socket

FIRST, PER_WORKER, WORKERS = 20_000, 3_000, 4
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
# From the process's number on: another test run on this machine is most likely elsewhere.
_ports = (FIRST + PER_WORKER * _worker + i % PER_WORKER for i in itertools.count(os.getpid()))


def free_port() -> int:
    """Return a TCP port that nobody uses, another one in every call."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
