"""The emulated cluster: network namespaces whose links are limited both ways.

Nodes hang on a bridge (other networks: `benchmarks.cluster.wiring`). It is in a namespace of its own, so
that nothing of it is in the machine's network, and removing the namespaces removes it all. Names hold the
process that made them: what a killed run leaves behind is found, and removed by the next one.
"""

import atexit
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from shutil import rmtree, which
from tempfile import gettempdir

PREFIX = "moe-cluster"
INTERFACE = "eth0"
MOST_NODES = 200  # which one subnet holds
# Jumbo frames: a fifth of the packets for the same bytes, on cores that the ranks need.
MTU = 9000
# The bucket is small against a message, which would else leave at once; it holds two frames at least.
SMALLEST_BURST, BURST_SECONDS = 20_000, 0.001
# Longer than TCP ever queues, so that no packet is dropped and no time is lost in retransmissions.
QUEUE_BYTES = 64_000_000


def namespace(node: int) -> str:
    """Return the name of a node's namespace, as this process makes it."""
    return f"{PREFIX}-{os.getpid()}-node{node}"


def address(node: int) -> str:
    """Return the IPv4 address of a node."""
    return f"10.77.0.{node + 1}"


def why_not() -> str | None:
    """Return what keeps this process from making a network, or None; tries it."""
    missing = [tool for tool in ("ip", "tc", "setpriv") if which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here"
    try:
        with network(1, 100):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` says: {error.stderr.strip()}"


@contextmanager
def network(nodes: int, rate_mbit: float) -> Iterator[None]:
    """Make nodes 0 .. N - 1 and remove them in the end.

    Args:
        nodes: N.
        rate_mbit: of every node's link, each way, in Mbit/s.

    Raises:
        CalledProcessError: a command of ip or tc failed; the error has its stderr.
    """
    with removed_in_the_end():
        switch = f"{PREFIX}-{os.getpid()}-switch"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for node in range(nodes):
            _add_node(node, switch, rate_mbit)
        yield


@contextmanager
def removed_in_the_end() -> Iterator[None]:
    """Remove what runs that are no more have left, now, and what this one has made, in the end."""
    sweep()
    # Should a second signal cut the removal below short.
    atexit.register(_remove)
    try:
        yield
    finally:
        _remove()
        atexit.unregister(_remove)


def sweep() -> None:
    """Remove namespaces and folders of runs that are no more, and end what still runs in them."""
    for name in filter(_is_left_over, _namespaces()):
        _delete(name)
    for folder in filter(lambda f: _is_left_over(f.name), Path(gettempdir()).glob(f"{PREFIX}-*")):
        rmtree(folder, ignore_errors=True)


def _is_left_over(name: str) -> bool:
    found = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
    return found is not None and not Path("/proc", found[1]).exists()


def _add_node(node: int, switch: str, rate_mbit: float) -> None:
    name, port = namespace(node), f"port{node}"
    ip("netns", "add", name)
    ours = ["name", INTERFACE, "netns", name, "mtu", str(MTU)]
    theirs = ["name", port, "netns", switch, "mtu", str(MTU)]
    ip("link", "add", *ours, "type", "veth", "peer", *theirs)
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
    for link in ("lo", INTERFACE):
        ip("-n", name, "link", "set", link, "up")
    # Outward at the node, inward at the bridge's port: several senders to one node share its link.
    limit(name, INTERFACE, rate_mbit)
    limit(switch, port, rate_mbit)


def limit(where: str, interface: str, rate_mbit: float) -> None:
    """Limit the rate at which a namespace sends over an interface."""
    bits = round(rate_mbit * 1e6)
    burst = max(SMALLEST_BURST, round(bits / 8 * BURST_SECONDS))
    limits = ["rate", f"{bits}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]
    run("tc", "-n", where, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def _remove() -> None:
    for name in _namespaces():
        if name.startswith(f"{PREFIX}-{os.getpid()}-"):
            _delete(name)


def _delete(name: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        # A process keeps its namespace alive after the name is gone. It may just have ended.
        subprocess.run(["kill", "-KILL", pid], capture_output=True)
    # Another run may sweep at the same time.
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return list(chain.from_iterable(line.split()[:1] for line in listed.splitlines()))


def ip(*words: str) -> None:
    """Run `ip`."""
    run("ip", *words)


def run(*words: str) -> None:
    """Run a command, of which nothing is seen but why it failed."""
    subprocess.run(words, check=True, capture_output=True, text=True)
