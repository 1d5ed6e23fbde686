"""A forest is a set of trees along which each rank's shard reaches all ranks as fast as possible.

`optimum` assigns links to trees, `edge_splitting` removes the switches, and `tree_packing` finds the trees.
"""

from typing import NamedTuple

from fairseq_tutel.plans.forestcoll.edge_splitting import without_switches
from fairseq_tutel.plans.forestcoll.optimum import (
    Optimum,
    Share,
    default_share,
    fixed_share,
    optimum,
)
from fairseq_tutel.plans.forestcoll.tree_packing import Tree, pack
from fairseq_tutel.plans.network import Network


class Forest(NamedTuple):
    """A network's trees, with k trees for each rank as root, listed root by root."""

    network: Network
    best: Optimum
    share: Share
    trees: list[Tree]

    @property
    def depth(self) -> int:
        """The largest number of edges from the root of a tree to a rank."""
        return max(max(tree.depths.values()) for tree in self.trees)


def grow(network: Network, trees: int | None = None) -> Forest:
    """Return the fastest forest of a network with k = `trees` trees for each root.

    Without `trees`, k is the least number of trees whose time is within `optimum.TOLERANCE` of the optimum.
    """
    best = optimum(network)
    share = fixed_share(network, best, trees) if trees else default_share(network, best)
    return Forest(network, best, share, pack(without_switches(network, share), share.trees))
