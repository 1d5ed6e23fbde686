"""Forests: trees that bring every root's shard to all ranks as fast as the network can, and what they load.

`forestcoll` shares out the links, `edge_splitting` takes out the switches, `tree_packing` finds the trees.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from fairseq_tutel.planning.network import Network
from fairseq_tutel.planning.traffic import busiest
from fairseq_tutel.plans.forestcoll.edge_splitting import Route, take, without_switches
from fairseq_tutel.plans.forestcoll.optimum import (
    Optimum,
    Share,
    default_share,
    fixed_share,
    optimal_share,
    optimum,
    roots_of,
)
from fairseq_tutel.plans.forestcoll.tree_packing import Tree, pack


@dataclass(frozen=True)
class Forest:
    """Trees of a network.

    Attributes:
        network: the links.
        root: of all trees; None: every rank has k.
        best: what no schedule is faster than.
        share: k, and how many trees a link may be in.
        trees: from rank to rank, those of a root side by side.
        routes: of every tree by its edges, over which links they go.
    """

    network: Network
    root: int | None
    best: Optimum
    share: Share
    trees: tuple[Tree, ...]
    routes: tuple[Mapping[tuple[int, int], list[Route]], ...]

    @property
    def loads(self) -> dict[tuple[int, int], int]:
        """By link, how many trees go over it."""
        loads: Counter[tuple[int, int]] = Counter()
        for routes in self.routes:
            for pieces in routes.values():
                for path, width in pieces:
                    for link in pairwise(path):
                        loads[link] += width
        return dict(loads)

    @property
    def seconds(self) -> Fraction:
        """Of a shard of one byte where bandwidths are bytes a second: by the busiest link."""
        return busiest(self.network, self.loads) / self.share.trees

    @property
    def depth(self) -> int:
        """Messages one after the other."""
        return max(max(tree.depths.values()) for tree in self.trees)


def grow(
    network: Network,
    root: int | None = None,
    trees: int | None = None,
    most_trees: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Forest:
    """Return the trees of a network.

    Args:
        network: the links.
        root: of all trees; None: every rank is one.
        trees: k of every root; None: the fewest within `forestcoll.TOLERANCE` of the optimum.
        most_trees: k at most, where it is not given.
        tell: receives a line of progress now and then.

    Raises:
        ValueError: no k trees have whole shares of what its switches receive and send.
    """
    roots, best = roots_of(network, root), optimum(network, root)
    if trees is None:
        share = default_share(network, roots, best, most_trees)
    else:
        fixed = fixed_share(network, roots, best, trees)
        if fixed is None:
            raise ValueError(
                f"{network.name} has no {trees} trees a root, since its switches' links are not alike in "
                f"both directions; give another number of trees, or none."
            )
        share = fixed
    capacities, left = without_switches(network, roots, share, tell)
    packed = pack(capacities, roots, share.trees, tell)
    routes = tuple({edge: take(left, *edge, tree.copies) for edge in tree.edges} for tree in packed)
    return Forest(network, root, best, share, tuple(packed), routes)


def grow_for(
    network: Network,
    collective: str,
    root: int | None = None,
    trees: int | None = None,
    most_trees: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Forest | None, Forest | None]:
    """Return the trees along which a collective adds up, and those along which it hands out.

    Those that add up are of the network with all links the other way: what they carry goes from leaves to
    roots. The arguments are those of `grow`.
    """
    adds = collective in ("reduce_scatter", "reduce", "all_reduce")
    hands_out = collective in ("all_gather", "broadcast", "all_reduce")
    there = grow(network, root, trees, most_trees, tell) if hands_out else None
    if not adds:
        return None, there
    back = network.reversed
    if there and sorted(back.links) == sorted(network.links):
        return there, there
    if not there:
        return grow(back, root, trees, most_trees, tell), None
    # Both have as many, at the latest those of the optimum, which is that of the other direction, too.
    if trees is None and not fixed_share(back, roots_of(back, root), there.best, there.share.trees):
        trees = optimal_share(network, there.best).trees
        there = grow(network, root, trees, tell=tell)
    return grow(back, root, there.share.trees, tell=tell), there
