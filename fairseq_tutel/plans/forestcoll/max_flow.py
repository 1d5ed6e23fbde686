"""Integer maximum flow and minimum cut by Dinic's algorithm (1970), for small and dense graphs.

The graphs have dozens of vertices. Capacities are in a matrix, and a set of vertices is an integer with a
bit for each vertex. A breadth-first search therefore needs a few operations per vertex instead of per edge.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise


class Flow:
    """A graph with the remaining capacity of each edge in `left[source][target]`.

    `out` has the targets of each vertex's edges as bits.
    """

    __slots__ = ("left", "out")

    def __init__(self, left: list[list[int]], out: list[int]) -> None:
        self.left, self.out = left, out

    @classmethod
    def of(cls, matrix: Sequence[Sequence[int]], more: int = 0) -> "Flow":
        """Return the graph for a matrix of capacities, with `more` additional vertices without edges."""
        size = len(matrix) + more
        left = [[*row, *[0] * more] for row in matrix] + [[0] * size for _ in range(more)]
        return cls(left, [sum(1 << target for target, c in enumerate(row) if c) for row in left])

    def copy(self) -> "Flow":
        """Return a copy of the graph, with a separate matrix of capacities."""
        return Flow([row[:] for row in self.left], self.out[:])

    def add(self, source: int, target: int, capacity: int) -> None:
        """Add `capacity`, which can be negative, to the capacity of an edge."""
        left = self.left[source][target] = self.left[source][target] + capacity
        if left:
            self.out[source] |= 1 << target
        else:
            self.out[source] &= ~(1 << target)

    def push(self, source: int, target: int, limit: int) -> tuple[int, int]:
        """Send the maximum flow, but at most `limit`, from source to target, and reduce the capacities.

        Returns:
            (flow, reached). If the flow is less than the limit, `reached` has the vertices that the source
            still reaches, as bits. They are one side of a minimum cut. Otherwise, `reached` is 0.
        """
        sent = 0
        while sent < limit:
            layers, seen = self._layers(source, target)
            if not seen >> target & 1:
                return sent, seen
            sent += self._block(source, target, layers, limit - sent)
        return sent, 0

    def _layers(self, source: int, target: int) -> tuple[list[int], int]:
        """Return the sets of vertices by distance from the source up to the target, and their union."""
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
        """Send flow along shortest paths until no path is left or `limit` is reached. Return the flow."""
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
    """Yield the vertices of a set, which are the bits of an integer, in increasing order."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
