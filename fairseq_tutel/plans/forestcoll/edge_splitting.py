"""Edge splitting replaces the links of switches by links between ranks, without reducing flows to ranks.

A link from u to switch w and a link from w to t become a link from u to t. The source is an extra vertex
with edges of capacity k (the trees per rank) to all N ranks. A replacement is allowed if a flow of k N from
the source to each rank stays possible. If a switch has equal total capacities in and out, all its links can
be replaced in any order (Bang-Jensen, Frank and Jackson, Preserving and increasing local edge-connectivity
in mixed graphs, 1995).

Let T be a set of vertices with at least one rank and without the source. The spare capacity (room) of T is
the capacity of links into T minus k N. Splitting reduces the room of sets that have w but neither u nor t,
and of sets that have u and t but not w.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from fairseq_tutel.plans.forestcoll.max_flow import Flow, members
from fairseq_tutel.plans.forestcoll.optimum import Share, reaches_all, with_source
from fairseq_tutel.plans.network import Network

# A piece is a new link (source, target, capacity).
Piece = tuple[int, int, int]


def without_switches(network: Network, share: Share) -> list[list[int]]:
    """Remove the switches of a network. Return the capacities between ranks by [source][target]."""
    splitting = _Splitting(network, share)
    for switch in network.switches:
        splitting.remove(switch)
    assert reaches_all(splitting.graph, network.ranks, splitting.needed)
    return [row[: network.ranks] for row in splitting.graph.left[: network.ranks]]


class _Splitting:
    """The capacities between ranks, switches and the source while edges are split."""

    def __init__(self, network: Network, share: Share) -> None:
        self.network = network
        self.graph = with_source(share.capacities, network.ranks, share.trees)
        self.source = len(network.vertices)
        self.needed = share.trees * network.ranks
        self.ranks = (1 << network.ranks) - 1
        # No flow can reach this capacity.
        self.endless = self.needed + sum(map(sum, share.capacities)) + 1

    def remove(self, switch: int) -> None:
        """Replace all links of a switch by links between the vertices that the switch connects.

        Links are first split evenly, so that trees are less deep. Links back to the same vertex come last.
        """
        self._split_evenly(switch, list(self._even(switch)))
        into, out = self._neighbours(switch)
        for u, t in sorted(product(into, out), key=lambda pair: pair[0] == pair[1]):
            most = min(self.graph.left[u][switch], self.graph.left[switch][t])
            self._split(self.graph, switch, (u, t, self._room(switch, u, t, most)))
        assert self._neighbours(switch) == ([], []), "all links of a switch can be replaced"

    def _neighbours(self, switch: int) -> tuple[list[int], list[int]]:
        """Return the vertices with links to a switch, and the vertices to which the switch has links."""
        into = [vertex for vertex, out in enumerate(self.graph.out) if out >> switch & 1]
        return into, list(members(self.graph.out[switch]))

    def _even(self, switch: int) -> Iterator[Piece]:
        """Yield new links, with capacities in proportion to those of the links that they replace."""
        into, out = self._neighbours(switch)
        left = self.graph.left
        for u in into:
            targets = self._partners(u, out)
            total = sum(left[switch][t] for t in targets)
            for t in targets:
                if amount := left[u][switch] * left[switch][t] // total:
                    yield u, t, amount

    def _partners(self, u: int, out: Sequence[int]) -> list[int]:
        """Return the vertices of `out` to which the links of vertex u should lead.

        These are the ranks on other hosts with u's local rank or, if there are none, all vertices except u.
        """
        places = dict(enumerate(self.network.places))
        alike = [t for t in out if u in places and t in places and places[u][1] == places[t][1]]
        return [t for t in alike if t != u] or [t for t in out if t != u]

    def _split_evenly(self, switch: int, pieces: Sequence[Piece]) -> None:
        """Replace links of a switch by the links `pieces`, but skip pieces that reduce flows too far."""
        if not pieces:
            return
        trial = self.graph.copy()
        for piece in pieces:
            self._split(trial, switch, piece)
        if min(map(min, trial.left)) >= 0 and reaches_all(trial, self.network.ranks, self.needed):
            for piece in pieces:
                self._split(self.graph, switch, piece)
        elif len(pieces) > 1:
            for half in (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]):
                self._split_evenly(switch, half)

    def _split(self, graph: Flow, switch: int, piece: Piece) -> None:
        u, t, amount = piece
        graph.add(u, switch, -amount)
        graph.add(switch, t, -amount)
        if u != t:
            graph.add(u, t, amount)

    def _room(self, switch: int, u: int, t: int, most: int) -> int:
        """Return how much capacity of a switch's links from u and to t can be replaced, up to `most`."""
        # For each of these pairs, splitting reduces the room of sets that have `end` but not `start`.
        for start, end in ((u, switch), (switch, t)):
            if most:
                graph = self.graph.copy()
                graph.add(start, self.source, self.endless)
                if u != t:
                    graph.add(u, t, self.endless)
                ranks = self.ranks & ~(1 << u | 1 << t) if start == u else self.ranks
                most = self._least(graph, start, end, ranks, most)
        return most

    def _least(self, graph: Flow, start: int, end: int, ranks: int, most: int) -> int:
        """Return the least spare capacity of vertex sets with `end` and one of `ranks` but not `start`.

        The returned capacity is at most `most`.
        """
        limit = self.needed + most
        sent, beyond = graph.push(start, end, limit)
        if sent == limit or ranks & ~beyond:
            return sent - self.needed
        for rank in members(ranks):
            trial = graph.copy()
            trial.add(rank, end, self.endless)
            limit = sent + trial.push(start, end, limit - sent)[0]
        return limit - self.needed
