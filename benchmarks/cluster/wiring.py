"""A network of ranks, switches and links as namespaces and pairs of interfaces, limited both ways."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.cluster.network import (
    INTERFACE,
    MOST_NODES,
    MTU,
    address,
    ip,
    limit,
    namespace,
    removed_in_the_end,
    run,
)
from benchmarks.cluster.settings import NETWORKS, Settings
from fairseq_tutel.plans.network import Network, find, to_json, ways

# Longer than any packet waits in a queue that TCP has filled, which it would else send again.
RESEND = "10s"


def networks(names: Sequence[str]) -> list[Network]:
    """Return those of --collectives.

    Raises:
        ValueError: a name is none, or has too many vertices; one sentence says so.
    """
    found = [find(name) for name in names or NETWORKS]
    for each in found:
        if len(each.vertices) > MOST_NODES:
            raise ValueError(
                f"--collectives {each.name} has {len(each.vertices)} GPUs and switches; give a network of "
                f"at most {MOST_NODES}, which one subnet holds."
            )
    return found


def within(settings: Settings, topology: Network) -> Settings:
    """Return the settings of a network's ranks."""
    text = json.dumps(to_json(topology))
    ranks = topology.ranks
    return replace(settings, nodes=ranks, local=1, sections=("collectives",), collectives=(text,))


@contextmanager
def wired(topology: Network, unit_mbit: float) -> Iterator[None]:
    """Make a network's vertices, rank r being node r, and its links, and remove them in the end.

    A vertex passes on what is for others, over the way from there over which it alone would come first.

    Args:
        topology: at most 200 vertices.
        unit_mbit: of a link of bandwidth 1, in Mbit/s.

    Raises:
        CalledProcessError: a command of ip or tc failed; the error has its stderr.
    """
    with removed_in_the_end():
        for vertex in range(len(topology.vertices)):
            _add_vertex(vertex)
        for a, b in {(min(link[:2]), max(link[:2])) for link in topology.links}:
            ip("link", "add", *_link_end(a, b), "type", "veth", "peer", *_link_end(b, a))
            for vertex, other in ((a, b), (b, a)):
                ip("-n", namespace(vertex), "link", "set", f"to{other}", "up")
        for link in topology.links:
            limit(namespace(link.source), f"to{link.target}", unit_mbit * link.bandwidth)
        for (vertex, rank), hop in next_hops(topology).items():
            way = ["via", address(hop), "dev", f"to{hop}", "onlink", "src", address(vertex)]
            route = [f"{address(rank)}/32", *way, "rto_min", RESEND]
            ip("-n", namespace(vertex), "route", "add", *route)
        yield


def next_hops(topology: Network) -> dict[tuple[int, int], int]:
    """Return the next vertex of a message by (vertex, target rank)."""
    hops = {}
    for rank in range(topology.ranks):
        for vertex, hop in ways(topology.reversed, rank).items():
            if vertex != rank:
                hops[vertex, rank] = hop
    return hops


def _add_vertex(vertex: int) -> None:
    name = namespace(vertex)
    ip("netns", "add", name)
    run("ip", "netns", "exec", name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    # Its address is none of a link's: a bridge without ports holds it.
    ip("-n", name, "link", "add", INTERFACE, "type", "bridge")
    ip("-n", name, "addr", "add", f"{address(vertex)}/32", "dev", INTERFACE)
    for link in ("lo", INTERFACE):
        ip("-n", name, "link", "set", link, "up")


def _link_end(vertex: int, other: int) -> list[str]:
    return ["name", f"to{other}", "netns", namespace(vertex), "mtu", str(MTU)]
