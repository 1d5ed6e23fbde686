"""Reads networks of GPUs, switches and links from files, or makes them from names such as `dgx_a100:2`.

The N ranks are vertices 0 to N - 1, in the order of (host, local rank), and switches follow. A link has one
direction and an integer bandwidth. Each link has a reverse link with the same bandwidth.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_tutel.files import json_of
from fairseq_tutel.plans.format import Load

FORMAT = 1
MOST_VERTICES = 4096  # A network has at most this many vertices.
MOST = 512  # A named network has at most this many GPUs.
WIDEST = 10**15  # A link has at most this bandwidth.


class Link(NamedTuple):
    """A link from one vertex of a network to another vertex, in one direction."""

    source: int
    target: int
    bandwidth: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of links between vertices, which are ranks (GPUs) and switches.

    There is at most one link from one vertex to another.

    Attributes:
        places: the (host, local rank) of every rank.
        vertices: the names of all vertices, with ranks before switches.
        unit: the unit of bandwidths, for error messages.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    vertices: tuple[str, ...]
    links: tuple[Link, ...]
    unit: str = "GB/s"

    @property
    def ranks(self) -> int:
        """The number of ranks in the network."""
        return len(self.places)

    @property
    def switches(self) -> range:
        """The vertices of the network that are not ranks."""
        return range(self.ranks, len(self.vertices))

    @cached_property
    def matrix(self) -> list[list[int]]:
        """The read-only matrix of bandwidths by [source][target], with 0 where there is no link."""
        matrix = [[0] * len(self.vertices) for _ in self.vertices]
        for link in self.links:
            matrix[link.source][link.target] = link.bandwidth
        return matrix

    @cached_property
    def digest(self) -> str:
        """A hash of the network without its names, written as 16 hexadecimal digits."""
        text = json.dumps([self.places, len(self.vertices), sorted(self.links)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def routed(network: Network, messages: Load) -> Load:
    """Return each link's load if every message between two ranks takes the fastest route."""
    loads: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    before = {source: ways(network, source) for source in {source for source, _ in messages}}
    for (source, target), amount in messages.items():
        vertex = target
        while vertex != source:
            loads[before[source][vertex], vertex] += amount
            vertex = before[source][vertex]
    return loads


def ways(network: Network, source: int) -> dict[int, int]:
    """Return the predecessor of each reachable vertex on its fastest route from a source (Dijkstra)."""
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
    """Read a network from a JSON file, or make the network with a name such as `torus:4x4`."""
    if text.endswith(".json"):
        return read(Path(text))
    kind, _, given = text.partition(":")
    if kind not in NETWORKS:
        known = ", ".join(f"{key}:{usage}" for key, (usage, _) in NETWORKS.items())
        raise ValueError(f"{text} is not a network; give the path of a JSON file or one of {known}.")
    usage, make = NETWORKS[kind]
    sizes = re.split("[:x]", given)
    is_number = [re.fullmatch("[1-9][0-9]{0,4}", each) for each in sizes]
    if len(sizes) != len(re.split("[:x]", usage)) or not all(is_number):
        raise ValueError(f"{text} is not a network; give {kind}:{usage} with whole numbers.")
    numbers = [int(each) for each in sizes]
    if math.prod(numbers[: 1 + usage.count("x")]) > MOST:
        raise ValueError(f"{text} has too many GPUs; give no more than {MOST}.")
    return checked(replace(make(*numbers), name=text))


def read(path: Path) -> Network:
    """Read a network from its JSON file."""
    try:
        data = json_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a network ({error}).") from error
    try:
        return from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_json(network: Network) -> dict[str, Any]:
    """Return the JSON object that describes a network of GPUs."""
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
    """Return the network that a JSON object describes. Raise ValueError if the object is not a network."""
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}; give format {FORMAT}")
        switches = list(data.get("switches", ()))
        gpus = sorted((gpu["host"], gpu["local"], gpu["name"]) for gpu in data["gpus"])
        names = [name for *_, name in gpus] + switches
        index = {name: vertex for vertex, name in enumerate(names)}
        network = Network(
            name=str(data.get("name", "")),
            places=tuple((host, local) for host, local, _ in gpus),
            vertices=tuple(names),
            links=tuple(
                Link(index[source], index[target], width) for source, target, width in data["links"]
            ),
            unit=str(data.get("unit", "GB/s")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"This is not a network: {error!r}.") from error
    return checked(network)


def checked(network: Network) -> Network:
    """Return the network unchanged. Raise ValueError if collectives cannot run on the network."""
    names, links = network.vertices, [link[:2] for link in network.links]
    _demand(len(names) <= MOST_VERTICES, f"it has {len(names):,} vertices, more than {MOST_VERTICES:,}")
    for what, values in (("name", names), ("place", network.places), ("link", links)):
        for value, times in Counter(values).items():
            _demand(times == 1, f"it has two vertices or links with the {what} {value}")
    for source, target, width in network.links:
        where = f"the link from {names[source]} to {names[target]}"
        _demand(source != target, f"{where} has the same vertex at both ends")
        is_width = type(width) is int and 0 < width <= WIDEST
        _demand(is_width, f"{where} has bandwidth {width!r:.40}; give a whole number from 1 to {WIDEST}")
        back = network.matrix[target][source]
        _demand(back == width, f"{where} has bandwidth {width}, but the link back {back}; give the same")
    _demand(network.ranks > 1, "it has fewer than two GPUs")
    reached = ways(network, 0)
    for rank in range(network.ranks):
        _demand(rank in reached, f"there is no route from {names[0]} to {names[rank]}; add links")
    return network


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"This is not a network: {otherwise}.")


def _made(
    hosts: int, local: int, switches: Iterable[str], both: Iterable[tuple[int, int, int]], unit: str
) -> Network:
    """Return a network of `hosts` hosts with `local` GPUs each. Each link exists in both directions."""
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
    """Return a network of boxes (hosts with several GPUs and a switch), joined by one more switch.

    Each box has `local` GPUs. Each GPU has a link of bandwidth `inside` to the box's switch, and a link of
    bandwidth `between` to the joining switch. With `shared`, each box has only one such link.
    """
    ranks = number * local
    links = [(rank, ranks + rank // local, inside) for rank in range(ranks)]
    switches = [f"switch{box}" for box in range(number)]
    if number > 1:
        ends = range(ranks, ranks + number) if shared else range(ranks)
        links += [(end, ranks + number, between) for end in ends]
        switches.append("network")
    return _made(number, local, switches, links, unit)


# The xGMI links in a box of eight MI250s (16 dies): (die, die, number of links) in each half of the box,
# and (die, die) between halves. The links are from github.com/liangyuRain/ForestColl (Zhao et al. 2024).
_MI250_HALF = (
    (0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4), (0, 4, 2), (3, 7, 2), (1, 5, 1), (2, 6, 1), (4, 6, 1),
    (5, 6, 1), (5, 7, 1),
)  # fmt: skip
_MI250_ACROSS = ((0, 8), (1, 9), (1, 10), (2, 9), (2, 10), (3, 11))


def _mi250(number: int) -> Network:
    inside = [(8 * half + a, 8 * half + b, n) for half in (0, 1) for a, b, n in _MI250_HALF]
    inside += [(a, b, 1) for a, b in _MI250_ACROSS]
    links = [(16 * box + a, 16 * box + b, 50 * n) for box in range(number) for a, b, n in inside]
    if number > 1:
        links += [(rank, 16 * number, 16) for rank in range(16 * number)]
    return _made(number, 16, ["network"] if number > 1 else [], links, "GB/s")


def _torus(rows: int, columns: int) -> Network:
    """Return a torus network, which is a grid of GPUs on one host with a ring in each row and column."""

    def at(row: int, column: int) -> int:
        return row % rows * columns + column % columns

    ends = {
        (min(at(row, column), other), max(at(row, column), other))
        for row, column in product(range(rows), range(columns))
        for other in (at(row + 1, column), at(row, column + 1))
    }
    return _made(1, rows * columns, (), [(a, b, 1) for a, b in sorted(ends) if a != b], "units")


# This table maps each kind of network to the format of its sizes and a function that makes the network.
NETWORKS: dict[str, tuple[str, Callable[..., Network]]] = {
    # A box has 8 A100s (NVLink 3, 200 Gb/s adapters) or 8 H100s (NVLink 4, 400 Gb/s adapters).
    "dgx_a100": ("BOXES", lambda number: boxes(number, 8, 300, 25, "GB/s")),
    "dgx_h100": ("BOXES", lambda number: boxes(number, 8, 450, 50, "GB/s")),
    "mi250": ("BOXES", _mi250),
    "boxes": ("BOXESxGPUS:INSIDE:BETWEEN", boxes),
    # benchmarks.cluster emulates this kind of network.
    "cluster": ("NODESxRANKS:INSIDE:BETWEEN", partial(boxes, shared=True)),
    "torus": ("ROWSxCOLUMNS", _torus),
}
