"""Maximum flow of whole numbers, and the minimum cut beside it.

Dinic's algorithm on dense graphs of some dozens of vertices, which is what networks are: capacities
are rows of a matrix, sets of vertices are bits of an integer, so that a breadth-first search takes a few
operations for a vertex and none for an edge.

Source: Dinic, Algorithm for solution of a problem of maximum flow in a network with power estimation, 1970.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise


class Flow:
    """A graph's capacities, of which flows take theirs.

    Attributes:
        left: by (source, target), what is left of the capacity.
        out: of a vertex the set of targets to which some is left.
    """

    __slots__ = ("left", "out")

    def __init__(self, left: list[list[int]], out: list[int]) -> None:
        self.left, self.out = left, out

    @classmethod
    def of(cls, matrix: Sequence[Sequence[int]], more: int = 0) -> "Flow":
        """Return a graph of a matrix of capacities, and that many vertices more without edges."""
        size = len(matrix) + more
        left = [[*row, *[0] * more] for row in matrix] + [[0] * size for _ in range(more)]
        return cls(left, [sum(1 << target for target, c in enumerate(row) if c) for row in left])

    def copy(self) -> "Flow":
        """Return the graph with what is left, for flows of their own."""
        return Flow([row[:] for row in self.left], self.out[:])

    def add(self, source: int, target: int, capacity: int) -> None:
        """Add to an edge; less than 0 takes away."""
        left = self.left[source][target] = self.left[source][target] + capacity
        if left:
            self.out[source] |= 1 << target
        else:
            self.out[source] &= ~(1 << target)

    def push(self, source: int, target: int, limit: int) -> tuple[int, int]:
        """Send as much as can be sent, at most the limit, and take it from the capacities.

        Returns:
            What was sent; and, if that is less than the limit, the source's side of a minimum cut, as
            bits: the smallest one.
        """
        sent = 0
        while sent < limit:
            layers, seen = self._layers(source, target)
            if not seen >> target & 1:
                return sent, seen
            sent += self._block(source, target, layers, limit - sent)
        return sent, 0

    def _layers(self, source: int, target: int) -> tuple[list[int], int]:
        """Return the sets of vertices by distance from the source, up to the target, and their union."""
        out = self.out
        layers = [1 << source]
        seen, end = layers[0], 1 << target
        while True:
            reached = 0
            for vertex in members(layers[-1]):
                reached |= out[vertex]
            reached &= ~seen
            if not reached:
                return layers, seen
            layers.append(reached)
            seen |= reached
            if reached & end:
                layers[-1] = end
                return layers, seen

    def _block(self, source: int, target: int, layers: list[int], limit: int) -> int:
        """Send along shortest ways until there is none, or the limit is reached; return how much."""
        left, out = self.left, self.out
        path, sent = [source], 0
        while path:
            vertex = path[-1]
            if vertex != target:
                onward = out[vertex] & layers[len(path)]
                if onward:
                    path.append((onward & -onward).bit_length() - 1)
                else:
                    path.pop()
                    layers[len(path)] &= ~(1 << vertex)
                continue
            edges = list(pairwise(path))
            amount = min(limit - sent, min(left[a][b] for a, b in edges))
            sent += amount
            full = 0
            for index, (a, b) in enumerate(reversed(edges), 1):
                left[a][b] -= amount
                left[b][a] += amount
                out[b] |= 1 << a
                if not left[a][b]:
                    out[a] &= ~(1 << b)
                    full = index
            if sent == limit:
                return sent
            del path[-full:]
        return sent


def members(bits: int) -> Iterator[int]:
    """Yield the vertices of a set, in order."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
