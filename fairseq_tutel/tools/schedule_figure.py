"""The figure of `schedule`: a network, the load of its links, its narrowest cut, and one root's trees."""

from itertools import pairwise
from math import cos, pi, sin
from pathlib import Path
from typing import Any

from fairseq_tutel.planning.network import Network
from fairseq_tutel.plans.forestcoll.forest import Forest

PLOTS = (".png", ".svg", ".pdf")
# How many trees of a root are drawn.
DRAWN = 2


def draw(forest: Forest, title: str, path: Path, sums: bool = False) -> None:
    """Write the figure, by matplotlib. With `sums` data goes to the roots, so arrows are reversed."""
    import matplotlib
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    network, share = forest.network, forest.share
    at = _positions(network)

    def line(axes: Any, source: int, target: int, width: float, color: Any) -> None:
        ends = (target, source) if sums else (source, target)
        _arrow(axes, at[ends[0]], at[ends[1]], width, color)

    root = forest.trees[0].root
    chosen = [tree for tree in forest.trees if tree.root == root][:DRAWN]
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(5 * (1 + len(chosen)), 5), layout="constrained")
        axes = figure.subplots(1, 1 + len(chosen), squeeze=False)[0]
        colors = matplotlib.colormaps["viridis"]
        widest = max(link.bandwidth for link in network.links)
        loads = forest.loads
        for link in network.links:
            full = loads.get((link.source, link.target), 0) / (share.stretch * link.bandwidth)
            crosses = forest.best.cut >> link.source & 1 > forest.best.cut >> link.target & 1
            color = "red" if crosses else colors(1 - float(full))
            line(axes[0], link.source, link.target, 0.5 + 3 * link.bandwidth / widest, color)
        _vertices(axes[0], network, at, forest.best.cut)
        side, width = forest.best.narrow
        axes[0].set_title(f"{title}\nnarrowest cut (red): {side} shard(s) over {width} {network.unit}")
        scale = matplotlib.cm.ScalarMappable(Normalize(0, 1), colors.reversed())
        figure.colorbar(scale, ax=axes[0], label="load of a link", shrink=0.6)
        hops = matplotlib.colormaps["tab10"]
        for axis, tree in zip(axes[1:], chosen, strict=True):
            depths, routes = tree.depths, forest.routes[forest.trees.index(tree)]
            for (parent, _), pieces in routes.items():
                for vertices, _ in pieces:
                    for a, b in pairwise(vertices):
                        line(axis, a, b, 1.5, hops(depths[parent] % 10))
            _vertices(axis, network, at, 1 << root)
            axis.set_title(
                f"a tree of {network.vertices[root]}, {tree.copies} of {share.trees}\n"
                f"depth {max(depths.values())}; a color is a hop"
            )
        figure.savefig(path, dpi=110)


def _positions(network: Network) -> list[tuple[float, float]]:
    """Return positions: hosts in a circle, ranks in a circle around each, switches between their links."""
    hosts = list(network.hosts.values())
    at: dict[int, tuple[float, float]] = {}
    for index, ranks in enumerate(hosts):
        x, y = (0.0, 0.0) if len(hosts) == 1 else _on_circle(index, len(hosts), 1.0)
        radius = 1.0 if len(hosts) == 1 else min(0.7, 2.2 / len(hosts))
        for place, rank in enumerate(ranks):
            dx, dy = _on_circle(place, len(ranks), radius) if len(ranks) > 1 else (0.0, 0.0)
            at[rank] = (x + dx, y + dy)
    for switch in network.switches:
        near = [x.source for x in network.links if x.target == switch and x.source in at]
        middle = [sum(at[v][axis] for v in near) / max(1, len(near)) for axis in (0, 1)]
        # Move a switch that would cover another vertex.
        while any(abs(middle[0] - x) + abs(middle[1] - y) < 0.05 for x, y in at.values()):
            middle[0] += 0.15
        at[switch] = (middle[0], middle[1])
    return [at[vertex] for vertex in range(len(network.vertices))]


def _on_circle(index: int, number: int, radius: float) -> tuple[float, float]:
    angle = pi / 2 - 2 * pi * index / number
    return radius * cos(angle), radius * sin(angle)


def _arrow(
    axes: Any, source: tuple[float, float], target: tuple[float, float], width: float, color: Any
) -> None:
    """Draw a link, curved, so that both directions are visible."""
    arrow = {
        "arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.08", "linewidth": width, "shrinkA": 8,
        "shrinkB": 8, "alpha": 0.8, "color": color,
    }  # fmt: skip
    axes.annotate("", xy=target, xytext=source, arrowprops=arrow)


def _vertices(axes: Any, network: Network, at: list[tuple[float, float]], marked: int) -> None:
    for vertex, (x, y) in enumerate(at):
        is_rank = vertex < network.ranks
        face = "mistyrose" if marked >> vertex & 1 else "white"
        box = {
            "boxstyle": "circle" if is_rank else "square",
            "facecolor": face,
            "edgecolor": "black",
        }
        text = str(vertex) if is_rank else network.vertices[vertex]
        axes.text(x, y, text, ha="center", va="center", fontsize=7, bbox=box)
    for limits, values in (
        (axes.set_xlim, [x for x, _ in at]),
        (axes.set_ylim, [y for _, y in at]),
    ):
        limits(min(values) - 0.2, max(values) + 0.2)
    axes.set_aspect("equal")
    axes.axis("off")
