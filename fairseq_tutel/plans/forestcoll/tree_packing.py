"""Finds k spanning trees per root, with no more trees on a link than its capacity (tree packing).

The algorithm grows one tree after another. Equal trees grow together, as m copies of one tree. A link (x,
y) limits the number of copies by its remaining capacity. Each set T of ranks that has y but not x also
limits the number of copies, by the spare capacity of T. The spare capacity of T is the capacity of links
into T minus the number of other trees that must still reach T (Edmonds 1973; Berczi and Frank, Packing
arborescences, 2009). Copies that cannot take a link become a separate tree with the edges so far.
At least one copy can always take some link. A set without spare capacity never gets spare capacity later.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.max_flow import Flow, members


class Tree(NamedTuple):
    """A tree and the number of its copies. Edges (parent, child) are in breadth-first order."""

    root: int
    copies: int
    edges: tuple[tuple[int, int], ...] = ()

    @property
    def depths(self) -> dict[int, int]:
        """The number of edges from the tree's root to each vertex."""
        depths = {self.root: 0}
        for source, target in self.edges:
            depths[target] = depths[source] + 1
        return depths


def pack(capacities: Sequence[Sequence[int]], trees: int) -> list[Tree]:
    """Return k = `trees` trees with each rank as root, with no more trees on a link than its capacity.

    `capacities` has the capacity of each link by [source][target].
    """
    packing = _Packing(capacities)
    growing = [Tree(root, trees) for root in reversed(range(len(capacities)))]
    grown = []
    while growing:
        tree, growing = packing.grow(growing.pop(), growing)
        grown.append(tree)
    return grown


class _Packing:
    """The remaining capacities of links between ranks during tree packing."""

    def __init__(self, capacities: Sequence[Sequence[int]]) -> None:
        self.links = Flow.of(capacities)
        self.everyone = (1 << len(capacities)) - 1
        self.full: list[int] = []  # The sets of ranks without spare capacity.

    def grow(self, tree: Tree, others: Sequence[Tree]) -> tuple[Tree, list[Tree]]:
        """Grow a tree to all ranks. Return the full tree, and the trees that must still grow.

        The trees that must still grow are `others` and copies that cannot take a link of the full tree.
        """
        others = list(others)
        graph = self._with_demands(others)
        depths = tree.depths
        reached = sum(1 << vertex for vertex in depths)
        while reached != self.everyone:
            source, target = self._next(depths, reached)
            copies = self._most(graph, source, target, tree.copies, others)
            if not copies:
                continue
            self.links.add(source, target, -copies)
            graph.add(source, target, -copies)
            if copies < tree.copies:
                others.append(tree._replace(copies=tree.copies - copies))
                graph = self._with_demands(others)
            tree = Tree(tree.root, copies, (*tree.edges, (source, target)))
            depths[target] = depths[source] + 1
            reached |= 1 << target
        return tree, others

    def _next(self, depths: Mapping[int, int], reached: int) -> tuple[int, int]:
        """Return the link nearest to the tree's root that no set in `full` excludes.

        Of several equally near links, the link with the largest capacity is returned.
        """
        left, out = self.links.left, self.links.out
        found, widest = None, (0, 0)
        for source, depth in depths.items():
            if found and -depth < widest[0]:
                continue
            onward = out[source] & ~reached
            for full in self.full:
                if onward & full and full & reached and not full >> source & 1:
                    onward &= ~full
            for target in members(onward):
                if not found or (-depth, left[source][target]) > widest:
                    found, widest = (source, target), (-depth, left[source][target])
        assert found, "there is always a link"
        return found

    def _with_demands(self, others: Sequence[Tree]) -> Flow:
        """Return the graph of remaining links, plus a source and a vertex for each of the other trees.

        The source has an edge to each of these vertices, which have edges to the ranks of their trees.
        """
        size = len(self.links.out)
        graph = Flow.of(self.links.left, 1 + len(others))
        for index, tree in enumerate(others):
            graph.add(size, size + 1 + index, tree.copies)
            for vertex in tree.depths:
                graph.add(size + 1 + index, vertex, tree.copies)
        return graph

    def _most(self, graph: Flow, source: int, target: int, copies: int, others: Sequence[Tree]) -> int:
        """Return how many copies of a tree can use the link from source to target."""
        size = len(self.links.out)
        demand = sum(tree.copies for tree in others)
        most = min(copies, self.links.left[source][target])
        graph = graph.copy()
        graph.add(size, source, demand + most)
        sent, beyond = graph.push(size, target, demand + most)
        if sent < demand + most:
            self.full.append(self.everyone & ~beyond)
        return min(most, sent - demand)
