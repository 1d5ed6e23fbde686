"""Forests: trees that bring each rank's shard to all ranks as fast as the network can.

`optimum` assigns the links to trees, `edge_splitting` removes the switches, `tree_packing` finds the trees.
"""

from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.edge_splitting import without_switches
from fairseq_tutel.plans.forestcoll.optimum import (
    Optimum,
    Share,
    default_share,
    fixed_share,
    optimal_share,
    optimum,
)
from fairseq_tutel.plans.forestcoll.tree_packing import Tree, pack
from fairseq_tutel.plans.network import Network


class Forest(NamedTuple):
    """Trees of a network, k for each rank; those of a root are next to each other."""

    network: Network
    best: Optimum
    share: Share
    trees: list[Tree]

    @property
    def depth(self) -> int:
        """The most edges from a root to a rank."""
        return max(max(tree.depths.values()) for tree in self.trees)


def grow(network: Network, trees: int | None = None, most_trees: int | None = None) -> Forest:
    """Return k trees of a network for each rank.

    Without `trees`, k is the least number within `optimum.TOLERANCE` of the optimum, at most `most_trees`.

    Raises:
        ValueError: k trees cannot use whole parts of the links of switches.
    """
    best = optimum(network)
    if trees is None:
        share: Share | None = default_share(network, best, most_trees)
    else:
        share = fixed_share(network, best, trees)
    if share is None:
        raise ValueError(
            f"{network.name} has no {trees} trees per root, since its switches' links differ between "
            f"directions; give another number of trees, or none."
        )
    return Forest(network, best, share, pack(without_switches(network, share), share.trees))


def grow_for(
    network: Network, collective: str, trees: int | None = None, most_trees: int | None = None
) -> tuple[Forest | None, Forest | None]:
    """Return the trees along which a collective reduces, and those along which it distributes; see `grow`.

    Trees that reduce are those of the network with reversed links, since data goes from leaves to roots.
    """
    there = grow(network, trees, most_trees) if collective != "reduce_scatter" else None
    if collective == "all_gather":
        return None, there
    back = network.reversed
    if there is None:
        return grow(back, trees, most_trees), None
    if sorted(back.links) == sorted(network.links):
        return there, there
    # Both need the same k. The optimum's k works, since both directions have the same optimum.
    if trees is None and not fixed_share(back, there.best, there.share.trees):
        there = grow(network, optimal_share(network, there.best).trees)
    return grow(back, there.share.trees), there
