"""Edge splitting: a network without its switches, through which as much can flow.

Of a switch w, a link from u to w and one from w to t become one from u to t, as far as k |R| can still flow
from the source of `forestcoll` to every rank. If as much leads into every switch as out of it, all links
of a switch can be replaced so, whatever was replaced before (Bang-Jensen, Frank and Jackson, Preserving and
increasing local edge-connectivity in mixed graphs, 1995).

Every set T of vertices with a rank in it and without the source has room: how much leads into it, less
the k |R| that must. Splitting takes room from two kinds of sets, those with w and without u and t, and
those with u and t and without w. It gives none: what is full stays full.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from fairseq_tutel.planning.network import Network
from fairseq_tutel.plans.forestcoll.max_flow import Flow, members
from fairseq_tutel.plans.forestcoll.optimum import Share, reaches_all, with_source

# Vertices that a message passes, and how many trees' messages may.
Route = tuple[tuple[int, ...], int]
# By (source, target).
Routes = dict[tuple[int, int], list[Route]]
# From which vertex, to which, and how much of it.
Piece = tuple[int, int, int]


def without_switches(
    network: Network, roots: Sequence[int], share: Share, tell: Callable[[str], None]
) -> tuple[list[list[int]], Routes]:
    """Return links between ranks alone, and what links of the network they are made of.

    Args:
        network: the links.
        roots: R.
        share: k, and how many trees each link may be in; it is enough for them.
        tell: receives a line of progress for every switch.
    """
    splitting = _Splitting(network, roots, share)
    for done, switch in enumerate(network.switches, 1):
        splitting.remove(switch)
        tell(f"replaced the links of {done} of {len(network.switches)} switches")
    assert reaches_all(splitting.graph, network.ranks, splitting.needed)
    return [row[: network.ranks] for row in splitting.graph.left[: network.ranks]], splitting.routes


class _Splitting:
    """Links between ranks and the switches that are left.

    Attributes:
        graph: how wide they are, and the source.
        routes: what they are made of.
        full: sets without room.
    """

    def __init__(self, network: Network, roots: Sequence[int], share: Share) -> None:
        self.network = network
        self.graph = with_source(share.capacities, roots, share.trees)
        self.source = len(network.vertices)
        self.needed = share.trees * len(roots)
        self.ranks = (1 << network.ranks) - 1
        # More than ever flows.
        self.endless = self.needed + sum(map(sum, share.capacities)) + 1
        self.full: list[int] = []
        self.routes: Routes = defaultdict(list)
        for source, row in enumerate(share.capacities):
            for target, width in enumerate(row):
                if width:
                    self.routes[source, target].append(((source, target), width))

    def remove(self, switch: int) -> None:
        """Replace all links of a switch: evenly, as trees are lower then, and what is left as it comes."""
        self._split_evenly(switch, list(self._even(switch)))
        into, out = self._neighbours(switch)
        for u, t in sorted(((u, t) for u in into for t in out), key=self._nearness):
            most = min(self.graph.left[u][switch], self.graph.left[switch][t])
            self._split(self.graph, switch, (u, t, self._room(switch, u, t, most)), self.routes)
        assert self._neighbours(switch) == ([], []), "all links of a switch can be replaced"

    def _neighbours(self, switch: int) -> tuple[list[int], list[int]]:
        """Return which vertices lead to a switch, and where it leads."""
        into = [vertex for vertex, out in enumerate(self.graph.out) if out >> switch & 1]
        return into, list(members(self.graph.out[switch]))

    def _nearness(self, pair: tuple[int, int]) -> tuple[int, int, int]:
        """Return what links between ranks are sorted by: others' hosts and own local rank first.

        The next host and the next local rank come first, so that neighbours are spread.
        """
        places, (u, t) = self.network.places, pair
        if max(pair) >= len(places):
            return (u == t, 0, (t - u) % self.source)
        (host, local), (to_host, to_local) = places[u], places[t]
        hosts, most = len(self.network.hosts), 1 + max(local for _, local in places)
        hops = (to_host - host) % hosts or hosts
        return (u == t, hops, (to_local - local) % most)

    def _even(self, switch: int) -> Iterator[Piece]:
        """Yield links that are in proportion to what they are made of."""
        into, out = self._neighbours(switch)
        left = self.graph.left
        for u in into:
            targets = self._partners(u, out)
            total = sum(left[switch][t] for t in targets)
            for t in targets:
                if amount := left[u][switch] * left[switch][t] // total:
                    yield u, t, amount

    def _partners(self, u: int, out: Sequence[int]) -> list[int]:
        """Return others' ranks that are alike, the same of another host, or else all."""
        places = dict(enumerate(self.network.places))
        alike = [t for t in out if u in places and t in places and places[u][1] == places[t][1]]
        return [t for t in alike if t != u] or [t for t in out if t != u]

    def _split_evenly(self, switch: int, pieces: Sequence[Piece]) -> None:
        """Replace links by those that are wanted: all at once, if there is room, else some."""
        if not pieces:
            return
        trial = self.graph.copy()
        for piece in pieces:
            self._split(trial, switch, piece)
        if min(map(min, trial.left)) >= 0 and reaches_all(trial, self.network.ranks, self.needed):
            for piece in pieces:
                self._split(self.graph, switch, piece, self.routes)
        elif len(pieces) > 1:
            for half in (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]):
                self._split_evenly(switch, half)

    def _split(self, graph: Flow, switch: int, piece: Piece, routes: Routes | None = None) -> None:
        """Replace links, and in routes, if they are given, too."""
        u, t, amount = piece
        if not amount:
            return
        graph.add(u, switch, -amount)
        graph.add(switch, t, -amount)
        if u != t:
            graph.add(u, t, amount)
        if routes is not None:
            first, second = take(routes, u, switch, amount), take(routes, switch, t, amount)
            if u != t:
                routes[u, t] += _joined(first, second)

    def _room(self, switch: int, u: int, t: int, most: int) -> int:
        """Return how much of the links from u and to t can be replaced."""
        with_switch, with_both = 1 << switch, 1 << u | 1 << t
        for full in self.full:
            inside = full & (with_switch | with_both)
            if inside in (with_switch, with_both):
                return 0
        # From u and t and the source to the switch and a rank; and the other way round.
        narrowest = 0
        for start, end in ((u, switch), (switch, t)):
            if not most:
                break
            graph = self.graph.copy()
            graph.add(start, self.source, self.endless)
            if u != t:
                graph.add(u, t, self.endless)
            without = with_both if start == u else 0
            most, narrowest = self._least(graph, start, end, without, most, narrowest)
        # Another one that was narrow keeps some room: only this one will be full.
        if narrowest:
            self.full.append(narrowest)
        return most

    def _least(
        self, graph: Flow, start: int, end: int, without: int, most: int, narrowest: int
    ) -> tuple[int, int]:
        """Return the least room of sets with the end and a rank, and without the start, and such a set.

        If none has less than `most`, return that, and `narrowest`.
        """
        limit = self.needed + most
        sent, beyond = graph.push(start, end, limit)
        ranks = self.ranks & ~without
        if sent == limit:
            return most, narrowest
        if ranks & ~beyond:
            return sent - self.needed, self._inside(beyond)
        trial, last = graph.copy(), None
        for rank in members(ranks):
            if last is not None and self._moved(trial, last, rank, end):
                last = rank
                continue
            if last is not None:
                trial = graph.copy()
            trial.add(rank, end, self.endless)
            more, beyond = trial.push(start, end, limit - sent)
            last = rank
            if sent + more < limit:
                limit, narrowest = sent + more, self._inside(beyond)
        return limit - self.needed, narrowest

    def _moved(self, graph: Flow, last: int, rank: int, end: int) -> bool:
        """Return whether what reached the end over one rank's endless edge can go over another's."""
        graph.add(last, end, -self.endless)
        if (over := -graph.left[last][end]) > 0:
            graph.add(last, end, over)
            graph.add(end, last, -over)
        graph.add(rank, end, self.endless)
        return over <= 0 or graph.push(last, end, over)[0] == over

    def _inside(self, beyond: int) -> int:
        return ((1 << self.source) - 1) & ~beyond


def take(routes: Routes, source: int, target: int, amount: int) -> list[Route]:
    """Take that much of the routes between two vertices, and return them."""
    kept, taken = routes[source, target], []
    while amount:
        path, width = kept.pop()
        if width > amount:
            kept.append((path, width - amount))
            width = amount
        taken.append((path, width))
        amount -= width
    return taken


def _joined(first: Sequence[Route], second: Sequence[Route]) -> list[Route]:
    """Return routes of which each goes on where another one ends."""
    joined, rest = [], list(second)
    for path, width in first:
        while width:
            onward, wide = rest.pop()
            both = min(width, wide)
            joined.append((_straight((*path, *onward[1:])), both))
            if wide > both:
                rest.append((onward, wide - both))
            width -= both
    return joined


def _straight(path: tuple[int, ...]) -> tuple[int, ...]:
    """Return a path without the rounds that come back to where they left it."""
    kept: list[int] = []
    for vertex in path:
        if vertex in kept:
            del kept[kept.index(vertex) :]
        kept.append(vertex)
    return tuple(kept)
