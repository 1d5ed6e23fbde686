"""Network: GPUs, switches and the links between them, from a file or by a name as `dgx_a100:2`.

N ranks are vertices 0 .. N - 1, in the order of (host, local rank); switches follow. A link has one
direction and an integer bandwidth in the network's own unit. What a vertex can send it can
also receive: `plans.forestcoll.optimum` needs that of switches, and no machine is otherwise.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_tutel.files.untrusted import json_of
from fairseq_tutel.planning.links import Load

FORMAT = 1
MOST_VERTICES = 4096  # the matrix has the square of this many numbers
MOST = 512  # GPUs of a network by name
WIDEST = 10**15  # bandwidth


class Link(NamedTuple):
    """A link in one direction, between vertices."""

    source: int
    target: int
    bandwidth: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """Ranks, switches and links, at most one from a vertex to another.

    Attributes:
        places: (host, local rank) of every rank.
        vertices: names of all vertices, the ranks' first.
        unit: unit of bandwidths, in messages.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    vertices: tuple[str, ...]
    links: tuple[Link, ...]
    unit: str = "GB/s"

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.places)

    @property
    def switches(self) -> range:
        """The vertices that are not ranks."""
        return range(self.ranks, len(self.vertices))

    @property
    def hosts(self) -> dict[int, list[int]]:
        """The ranks of every host."""
        found: dict[int, list[int]] = {}
        for rank, (host, _) in enumerate(self.places):
            found.setdefault(host, []).append(rank)
        return found

    @cached_property
    def matrix(self) -> list[list[int]]:
        """Bandwidths by (source, target), 0 without a link. Read-only."""
        matrix = [[0] * len(self.vertices) for _ in self.vertices]
        for link in self.links:
            matrix[link.source][link.target] = link.bandwidth
        return matrix

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal for networks that differ in names alone."""
        text = json.dumps([self.places, len(self.vertices), sorted(self.links)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def reversed(self) -> "Network":
        """The network with all links in the opposite direction."""
        links = (link._replace(source=link.target, target=link.source) for link in self.links)
        return replace(self, links=tuple(links))


def routed(network: Network, messages: Load) -> Load:
    """Return the load of every link by messages between ranks, which take their fastest routes."""
    loads: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    before = {source: ways(network, source) for source in {source for source, _ in messages}}
    for (source, target), amount in messages.items():
        vertex = target
        while vertex != source:
            loads[before[source][vertex], vertex] += amount
            vertex = before[source][vertex]
    return loads


def ways(network: Network, source: int) -> dict[int, int]:
    """Return for every vertex its predecessor on the fastest route from a source (Dijkstra)."""
    before: dict[int, int] = {}
    found = [(Fraction(0), 0, source, source)]
    while found:
        seconds, links, vertex, last = heappop(found)
        if vertex not in before:
            before[vertex] = last
            for target, bandwidth in enumerate(network.matrix[vertex]):
                if bandwidth:
                    heappush(found, (seconds + Fraction(1, bandwidth), links + 1, target, vertex))
    return before


def find(text: str) -> Network:
    """Return a network by its FILE.json or by a name such as `torus:4x4`."""
    if text.endswith(".json"):
        return read(Path(text))
    kind, _, given = text.partition(":")
    if kind not in NETWORKS:
        known = ", ".join(f"{key}:{usage}" for key, (usage, _) in NETWORKS.items())
        raise ValueError(f"{text} is not a network; give a FILE.json or one of {known}.")
    usage, make = NETWORKS[kind]
    sizes = re.split("[:x]", given)
    is_number = [re.fullmatch("[1-9][0-9]{0,4}", each) for each in sizes]
    if len(sizes) != len(re.split("[:x]", usage)) or not all(is_number):
        raise ValueError(f"{text} is not a network; give it as {kind}:{usage}, of whole numbers.")
    numbers = [int(each) for each in sizes]
    if math.prod(numbers[: 1 + usage.count("x")]) > MOST:
        raise ValueError(f"{text} has too many GPUs; give no more than {MOST}.")
    return checked(replace(make(*numbers), name=text))


def read(path: Path) -> Network:
    """Read a network's file."""
    try:
        data = json_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can not be read as a network ({error}).") from error
    try:
        return from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_json(network: Network) -> dict[str, Any]:
    """Return the JSON value of a network's file."""
    names = network.vertices
    gpus = zip(names, network.places, strict=False)
    return {
        "format": FORMAT,
        "name": network.name,
        "unit": network.unit,
        "gpus": [{"name": name, "host": host, "local": local} for name, (host, local) in gpus],
        "switches": list(names[network.ranks :]),
        "links": [[names[x.source], names[x.target], x.bandwidth] for x in network.links],
    }


def from_json(data: Any) -> Network:
    """Return the network of a JSON value."""
    _demand(isinstance(data, Mapping), "it is not a JSON object")
    _demand(data.get("format") == FORMAT, f"its format is {data.get('format')!r}, not {FORMAT}")
    known = {"format", "name", "unit", "gpus", "switches", "links"}
    _demand(data.keys() <= known, f"it has unknown fields: {sorted(data.keys() - known)}")
    for key in ("gpus", "links"):
        _demand(isinstance(data.get(key), list), f"it has no list of {key}")
    switches = data.get("switches", [])
    are_names = isinstance(switches, list) and all(isinstance(name, str) for name in switches)
    _demand(are_names, "its switches are no list of names")
    vertices = len(data["gpus"]) + len(switches)
    _demand(vertices <= MOST_VERTICES, f"it has {vertices:,} vertices, more than {MOST_VERTICES:,}")
    gpus = sorted(_gpu_of(each) for each in data["gpus"])
    names = [name for *_, name in gpus] + switches
    index = {name: vertex for vertex, name in enumerate(names)}
    network = Network(
        name=str(data.get("name", "")),
        places=tuple((host, local) for host, local, _ in gpus),
        vertices=tuple(names),
        links=tuple(_link_of(each, index) for each in data["links"]),
        unit=str(data.get("unit", "GB/s")),
    )
    return checked(network)


def checked(network: Network) -> Network:
    """Return the network, or raise a ValueError if collectives cannot run on it."""
    names = network.vertices
    for twice in _repeated(names):
        _demand(False, f"two vertices have the name {twice!r}")
    for host, local in _repeated(network.places):
        _demand(False, f"two GPUs are local rank {local} of host {host}")
    for source, target in _repeated(link[:2] for link in network.links):
        _demand(False, f"two links lead from {names[source]} to {names[target]}; give one of their sum")
    for vertex, name in enumerate(names):
        received = sum(row[vertex] for row in network.matrix)
        sent = sum(network.matrix[vertex])
        text = f"{name} receives {received} {network.unit} and sends {sent}; give it as much of both"
        _demand(received == sent, text)
    _demand(network.ranks > 1, "it has less than two GPUs")
    # In a balanced network, vertices reachable from one vertex are reachable from all.
    reached = ways(network, 0)
    for rank in range(network.ranks):
        _demand(rank in reached, f"there is no way from {names[0]} to {names[rank]}")
    return network


def _gpu_of(data: Any) -> tuple[int, int, str]:
    _demand(
        isinstance(data, Mapping)
        and data.keys() == {"name", "host", "local"}
        and isinstance(data["name"], str)
        and all(_is_whole(data[key]) and data[key] >= 0 for key in ("host", "local")),
        f'{data!r} is not a GPU such as {{"name": "gpu0", "host": 0, "local": 0}}',
    )
    return data["host"], data["local"], data["name"]


def _link_of(data: Any, index: Mapping[str, int]) -> Link:
    is_link = isinstance(data, list) and len(data) == 3 and all(isinstance(name, str) for name in data[:2])
    _demand(is_link, f"{data!r} is not a link such as [from, to, bandwidth]")
    source, target, bandwidth = data
    where = f"the link from {source} to {target}"
    for name in (source, target):
        _demand(name in index, f"{where} names {name!r}, which is not a vertex")
    _demand(source != target, f"{where} ends where it begins")
    is_width = _is_whole(bandwidth) and 0 < bandwidth <= WIDEST
    _demand(is_width, f"{where} has the bandwidth {bandwidth!r:.40}, no whole number from 1 to {WIDEST}")
    return Link(index[source], index[target], bandwidth)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, times in Counter(values).items() if times > 1]


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"This is not a network: {otherwise}.")


def _made(
    hosts: int, local: int, switches: Iterable[str], both: Iterable[tuple[int, int, int]], unit: str
) -> Network:
    """Return a network with links in both directions."""
    places = tuple((host, rank) for host in range(hosts) for rank in range(local))
    return Network(
        name="",
        places=places,
        vertices=(*(f"gpu{host}.{rank}" for host, rank in places), *switches),
        links=tuple(link for a, b, width in both for link in (Link(a, b, width), Link(b, a, width))),
        unit=unit,
    )


def boxes(
    number: int, local: int, inside: int, between: int, unit: str = "units", shared: bool = False
) -> Network:
    """Return boxes of `local` GPUs with a switch each, and one switch between them.

    `inside` and `between` are bandwidths of a GPU in its box, and to other boxes. With `shared`, the GPUs
    of a box share one link to other boxes.
    """
    ranks = number * local
    links = [(rank, ranks + rank // local, inside) for rank in range(ranks)]
    switches = [f"switch{box}" for box in range(number)]
    if number > 1:
        ends = range(ranks, ranks + number) if shared else range(ranks)
        links += [(end, ranks + number, between) for end in ends]
        switches.append("network")
    return _made(number, local, switches, links, unit)


# xGMI links of the 16 dies of a box of eight MI250: within each half, and between halves. Sources: the
# public repository of ForestColl (github.com/liangyuRain/ForestColl, topologies.py), Zhao et al. 2024.
_MI250_HALF = (
    (0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4), (0, 4, 2), (3, 7, 2), (1, 5, 1), (2, 6, 1), (4, 6, 1),
    (5, 6, 1), (5, 7, 1),
)  # fmt: skip
_MI250_ACROSS = ((0, 8), (1, 9), (1, 10), (2, 9), (2, 10), (3, 11))


def _mi250(number: int) -> Network:
    inside = [(8 * half + a, 8 * half + b, n) for half in (0, 1) for a, b, n in _MI250_HALF]
    inside += [(a, b, 1) for a, b in _MI250_ACROSS]
    links = [(16 * box + a, 16 * box + b, 50 * n) for box in range(number) for a, b, n in inside]
    ranks = 16 * number
    if number == 1:
        return _made(1, 16, (), links, "GB/s")
    links += [(rank, ranks, 16) for rank in range(ranks)]
    return _made(number, 16, ["network"], links, "GB/s")


def _torus(rows: int, columns: int) -> Network:
    """Return ranks of one host in a grid whose rows and columns are rings."""

    def at(row: int, column: int) -> int:
        return row % rows * columns + column % columns

    ends = {
        (min(at(row, column), other), max(at(row, column), other))
        for row, column in product(range(rows), range(columns))
        for other in (at(row + 1, column), at(row, column + 1))
    }
    return _made(1, rows * columns, (), [(a, b, 1) for a, b in sorted(ends) if a != b], "units")


# By name: the format of its sizes, and a function that returns the network.
NETWORKS: dict[str, tuple[str, Callable[..., Network]]] = {
    # 8 A100, NVLink 3 at 300 GB/s and a 200 Gb/s adapter each; 8 H100 with NVLink 4 and 400 Gb/s.
    "dgx_a100": ("BOXES", lambda number: boxes(number, 8, 300, 25, "GB/s")),
    "dgx_h100": ("BOXES", lambda number: boxes(number, 8, 450, 50, "GB/s")),
    "mi250": ("BOXES", _mi250),
    "boxes": ("BOXESxGPUS:INSIDE:BETWEEN", boxes),
    # As in benchmarks.cluster.
    "cluster": ("NODESxRANKS:INSIDE:BETWEEN", partial(boxes, shared=True)),
    "torus": ("ROWSxCOLUMNS", _torus),
}
