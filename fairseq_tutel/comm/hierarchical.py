"""2-D hierarchical all-to-all: within nodes first, then between them, so that messages across are few.

N nodes of L ranks, P = N * L, rank = n * L + l; R rows, D model_dim, e local experts. What rank (n, l) has
for (n', l') goes to its neighbour (n, l') first, with all else that the node has for local index l', and
from there to node n' in one message. Across nodes a rank sends N - 1 messages instead of P - L, each L
times as large. The result is the linear exchange's, bit for bit.

Source: Tutel (Hwang et al. 2023), section 3.4.
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from fairseq_tutel.comm.all_to_all import Splits, even_exchange, exchange_rows
from fairseq_tutel.comm.regroup import regroup_maps
from fairseq_tutel.comm.topology import Grid
from fairseq_tutel.comm.trip import Counts, Trip


@dataclass(frozen=True, kw_only=True)
class HierarchicalTrip(Trip):
    """Rows in two hops.

    Attributes:
        grid: the nodes.
        within: (send, receive) rows of the leg inside the node, L numbers each.
        across: (send, receive) rows of the leg between nodes, N numbers each.
        by_local: [R], rows in (node, local) order of their destination to (local, node) order, and back.
        by_node: [R'], rows in (source local, node) order to (node, source local) order, and back.
    """

    grid: Grid
    within: tuple[Splits, Splits]
    across: tuple[Splits, Splits]
    by_local: tuple[Tensor, Tensor]
    by_node: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        device: Counts,
        host: Counts,
        grid: Grid,
        **options: Any,
    ) -> Self:
        """Plan a trip by its counts; the options are those of every trip."""
        assert device.passing_LNE is not None and host.passing_LNE is not None
        nodes, local = grid.nodes, grid.local
        leaving_NL = host.leaving_PE.sum(1).view(nodes, local)
        arriving_NL = host.arriving_PE.sum(1).view(nodes, local)
        passing_LN = host.passing_LNE.sum(2)
        leaving = device.leaving_PE.sum(1).view(nodes, local)
        return cls(
            grid=grid,
            within=(tuple(leaving_NL.sum(0).tolist()), tuple(passing_LN.sum(1).tolist())),
            across=(tuple(passing_LN.sum(0).tolist()), tuple(arriving_NL.sum(1).tolist())),
            by_local=regroup_maps(leaving, int(leaving_NL.sum())),
            by_node=regroup_maps(device.passing_LNE.sum(2), int(passing_LN.sum())),
            **options,
        )

    def move(self, wire_RX: Tensor, homeward: bool) -> Tensor:
        """Send and receive, within the node and across."""
        rows = wire_RX
        if not homeward:
            rows = self._within(rows.index_select(0, self.by_local[0]), *self.within)
            return self._across(rows.index_select(0, self.by_node[0]), *self.across)
        (send, receive), (send_across, receive_across) = self.within, self.across
        rows = self._across(rows, receive_across, send_across).index_select(0, self.by_node[1])
        return self._within(rows, receive, send).index_select(0, self.by_local[1])

    def _within(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return exchange_rows(rows, send, receive, self.grid.node_group, self)

    def _across(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return exchange_rows(rows, send, receive, self.grid.rail_group, self)


def exchange_counts(counts_PE: Tensor, grid: Grid) -> Counts:
    """Tell every rank of the grid what is to come, in two hops as the rows'. Collective.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the grid.
        grid: the nodes.
    """
    leaving_NLE = counts_PE.view(grid.nodes, grid.local, -1)
    passing_LNE = even_exchange(leaving_NLE.transpose(0, 1), grid.node_group)
    arriving_NLE = even_exchange(passing_LNE.transpose(0, 1), grid.rail_group)
    return Counts(counts_PE, arriving_NLE.reshape(counts_PE.shape), passing_LNE)
