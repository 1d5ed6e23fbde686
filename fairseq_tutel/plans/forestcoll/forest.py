"""Forests: sets of trees along which each rank's shard reaches all ranks as fast as the network allows.

`optimum` assigns links to trees, `edge_splitting` removes the switches, and `tree_packing` finds the trees.
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
    """Trees for a network: k trees with each rank as root, listed root by root."""

    network: Network
    best: Optimum
    share: Share
    trees: list[Tree]

    @property
    def depth(self) -> int:
        """The largest number of edges from a root to a rank."""
        return max(max(tree.depths.values()) for tree in self.trees)


def grow(network: Network, trees: int | None = None, most_trees: int | None = None) -> Forest:
    """Return the fastest forest of a network with k = `trees` trees for each root.

    Without `trees`, k is at most `most_trees`, and the least number within `optimum.TOLERANCE` of the
    optimum.

    Raises:
        ValueError: k trees cannot divide the links of the switches into whole parts.
    """
    best = optimum(network)
    if trees is None:
        share: Share | None = default_share(network, best, most_trees)
    else:
        share = fixed_share(network, best, trees)
    if share is None:
        raise ValueError(
            f"{network.name} has no {trees} trees per root, because links of its switches differ between "
            f"directions; give another number of trees, or leave it out."
        )
    return Forest(network, best, share, pack(without_switches(network, share), share.trees))


def grow_for(
    network: Network, collective: str, trees: int | None = None, most_trees: int | None = None
) -> tuple[Forest | None, Forest | None]:
    """Return the two forests with which a collective reduces data and then distributes data.

    A forest that is not needed is None. `grow` describes the options. Data is reduced from leaves to roots,
    so the forest for this is made for the network with reversed links.
    """
    distributing = grow(network, trees, most_trees) if collective != "reduce_scatter" else None
    if collective == "all_gather":
        return None, distributing
    reversed_network = network.reversed
    if distributing is None:
        return grow(reversed_network, trees, most_trees), None
    if sorted(reversed_network.links) == sorted(network.links):
        return distributing, distributing
    # Both forests need the same k. The optimum's k works, because both directions have the same optimum.
    if trees is None and not fixed_share(reversed_network, distributing.best, distributing.share.trees):
        distributing = grow(network, optimal_share(network, distributing.best).trees)
    return grow(reversed_network, distributing.share.trees), distributing
