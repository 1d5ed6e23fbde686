"""All-to-all of rows, ragged or even: linear, where every rank sends to every other, hierarchical, by plan.

R rows, D model_dim, e local experts, P ranks of the group, which may be N nodes of L: rank = n * L + l.

Hierarchical (2DH) goes within nodes first, then between them, so that messages across are few. What rank
(n, l) has for (n', l') goes to its neighbour (n, l') first, with all else that the node has for local
index l', and from there to node n' in one message. Across nodes a rank sends N - 1 messages instead of
P - L, each L times as large. The result is the linear exchange's, bit for bit. Source: Tutel (Hwang et al.
2023), section 3.4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.comm.collectives import all_gather, all_to_all, all_to_all_by
from fairseq_tutel.comm.regroup import regroup_maps
from fairseq_tutel.comm.call_id import NO_STAMP, Stamp
from fairseq_tutel.comm.transfer import Counts, Trip
from fairseq_tutel.ranks.groups import Grid

COUNTS = "the exchange of row counts"
Splits = tuple[int, ...]
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearTrip(Trip):
    """Rows in one hop.

    Attributes:
        group: the ranks.
        send: P numbers, rows for each rank.
        receive: P numbers, rows from each rank.
    """

    group: dist.ProcessGroup
    send: Splits
    receive: Splits

    @classmethod
    def of(
        cls,
        host: Counts,
        group: dist.ProcessGroup,
        **options: Any,
    ) -> Self:
        """Plan a trip by its counts on the host; the options are those of every trip."""
        return cls(
            group=group,
            send=tuple(host.leaving_PE.sum(1).tolist()),
            receive=tuple(host.arriving_PE.sum(1).tolist()),
            **options,
        )

    def move(self, wire_RX: Tensor, homeward: bool) -> Tensor:
        """Send and receive."""
        splits = (self.receive, self.send) if homeward else (self.send, self.receive)
        return exchange_rows(wire_RX, *splits, self.group, self)


@dataclass(frozen=True, kw_only=True)
class HierarchicalTrip(Trip):
    """Rows in two hops.

    Attributes:
        grid: the nodes.
        within: (send, receive) rows of the leg inside the node, L numbers each.
        across: (send, receive) rows of the leg between nodes, N numbers each.
        by_local: moves rows in (node, local) order of their destination to (local, node) order, and back.
        by_node: moves rows in (source local, node) order to (node, source local) order, and back.
    """

    grid: Grid
    within: tuple[Splits, Splits]
    across: tuple[Splits, Splits]
    by_local: tuple[Move, Move]
    by_node: tuple[Move, Move]

    @classmethod
    def of(
        cls,
        device: Counts,
        host: Counts,
        grid: Grid,
        backend: str = "auto",
        **options: Any,
    ) -> Self:
        """Plan a trip by its counts, for kernels of a backend; the options are those of every trip."""
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
            by_local=_regrouping(leaving, leaving_NL, backend),
            by_node=_regrouping(device.passing_LNE.sum(2), passing_LN, backend),
            **options,
        )

    def move(self, wire_RX: Tensor, homeward: bool) -> Tensor:
        """Send and receive, within the node and across."""
        rows = wire_RX
        if not homeward:
            rows = self._within(self.by_local[0](rows), *self.within)
            return self._across(self.by_node[0](rows), *self.across)
        (send, receive), (send_across, receive_across) = self.within, self.across
        rows = self.by_node[1](self._across(rows, receive_across, send_across))
        return self.by_local[1](self._within(rows, receive, send))

    def _within(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return exchange_rows(rows, send, receive, self.grid.node_group, self)

    def _across(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return exchange_rows(rows, send, receive, self.grid.rail_group, self)


@dataclass(frozen=True, kw_only=True)
class PlanTrip(Trip):
    """Rows as a plan of an all_to_all moves them: its chunks are blocks of rows, each of its own size.

    Attributes:
        group: the ranks.
        plan: by its name.
        crossing_PP: rows from every rank to every rank: a plan may pass them through any.
    """

    group: dist.ProcessGroup
    plan: str
    crossing_PP: tuple[Splits, ...]

    @classmethod
    def of(cls, host: Counts, group: dist.ProcessGroup, plan: str, **options: Any) -> Self:
        """Plan a trip by its counts on the host; the options are those of every trip."""
        assert host.crossing_PPE is not None
        rows = host.crossing_PPE.sum(2).tolist()
        return cls(group=group, plan=plan, crossing_PP=tuple(map(tuple, rows)), **options)

    def move(self, wire_RX: Tensor, homeward: bool) -> Tensor:
        """Send and receive."""
        sizes = tuple(zip(*self.crossing_PP, strict=True)) if homeward else self.crossing_PP

        def move() -> Tensor:
            return all_to_all_by(self.plan, wire_RX, self.name, self.group, sizes)

        return move() if self.timer is None else self.timer.measure(wire_RX, move)


def _regrouping(counts_AB: Tensor, host_AB: Tensor, backend: str) -> tuple[Move, Move]:
    """Return what moves rows of blocks in the order (a, b) to the order (b, a), and what moves them back.

    Even blocks, as padded buffers have, are a copy with other strides; others go by maps.
    """
    if bool((host_AB == host_AB[0, 0]).all()):
        outer, inner = host_AB.shape

        def copy(rows: Tensor, outer: int, inner: int) -> Tensor:
            return kernels.ops(backend, rows.device).stride_copy(rows, outer, inner)

        return lambda rows: copy(rows, outer, inner), lambda rows: copy(rows, inner, outer)
    there, back = regroup_maps(counts_AB, int(host_AB.sum()))
    return lambda rows: rows.index_select(0, there), lambda rows: rows.index_select(0, back)


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup, stamp: Stamp = NO_STAMP) -> Counts:
    """Tell every rank how many rows it is to be sent for each of its experts. Collective.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the group.
        group: the ranks.
        stamp: of this call, which goes along.
    """
    came = all_to_all(stamp.beside(counts_PE), COUNTS, group)
    return Counts(counts_PE, came[:, 1 : 1 + counts_PE.shape[1]], stamps_P=came[:, 0])


def exchange_counts_in_two_hops(counts_PE: Tensor, grid: Grid, stamp: Stamp = NO_STAMP) -> Counts:
    """Tell every rank of the grid what is to come, in two hops as the rows'. Collective.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the grid.
        grid: the nodes.
        stamp: of this call, which goes along.
    """
    own = slice(1, 1 + counts_PE.shape[1])
    leaving_NLX = stamp.beside(counts_PE).view(grid.nodes, grid.local, -1)
    passing_LNX = all_to_all(leaving_NLX.transpose(0, 1).contiguous(), COUNTS, grid.node_group)
    came_NLX = all_to_all(passing_LNX.transpose(0, 1).contiguous(), COUNTS, grid.rail_group)
    came_PX = came_NLX.flatten(0, 1)
    return Counts(counts_PE, came_PX[:, own], passing_LNX[..., own], stamps_P=came_PX[:, 0])


def exchange_all_counts(
    counts_PE: Tensor, group: dist.ProcessGroup, stamp: Stamp = NO_STAMP
) -> Counts:
    """Tell every rank how many rows go from and to all. Collective.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the group.
        group: the ranks.
        stamp: of this call, which goes along.
    """
    came_PPX = all_gather(stamp.beside(counts_PE), COUNTS, group)
    crossing_PPE = came_PPX[..., 1 : 1 + counts_PE.shape[1]]
    arriving_PE = crossing_PPE[:, dist.get_rank(group)]
    return Counts(counts_PE, arriving_PE, crossing_PPE=crossing_PPE, stamps_P=came_PPX[:, 0, 0])


def exchange_rows(
    rows: Tensor, send: Splits, receive: Splits, group: dist.ProcessGroup, trip: Trip
) -> Tensor:
    """Send the next send[p] rows to rank p of the group; return what all ranks sent, by source.

    The trip that this is a leg of gives its name to errors, and its timer.
    """

    def move() -> Tensor:
        return all_to_all(rows, trip.name, group, receive, send)

    return move() if trip.timer is None else trip.timer.measure(rows, move)
