"""2-D hierarchical all-to-all: within nodes first, then between them, so that messages across are few.

N nodes of L ranks, P = N * L, rank = n * L + l; R rows, D model_dim, e local experts. What rank (n, l) has
for (n', l') goes to its neighbour (n, l') first, with all else that the node has for local index l', and
from there to node n' in one message. Across nodes a rank sends N - 1 messages instead of P - L, each L
times as large. The result is the linear exchange's, bit for bit.

Source: Tutel (Hwang et al. 2023), section 3.4.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_tutel.comm.all_to_all import ExchangeTimer, exchange_rows
from fairseq_tutel.comm.regroup import regroup_maps
from fairseq_tutel.comm.topology import Grid

Splits = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HierarchicalTrip:
    """One exchange there and back, its counts known.

    Attributes:
        grid: the nodes.
        within: (send, receive) rows of the leg inside the node, L numbers each.
        across: (send, receive) rows of the leg between nodes, N numbers each.
        by_local: [R], rows in (node, local) order of their destination to (local, node) order, and back.
        by_node: [R'], rows in (source local, node) order to (node, source local) order, and back.
        timer: adds the time of all legs where given.
    """

    grid: Grid
    within: tuple[Splits, Splits]
    across: tuple[Splits, Splits]
    by_local: tuple[Tensor, Tensor]
    by_node: tuple[Tensor, Tensor]
    timer: ExchangeTimer | None = None

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank, or stay on it."""
        return sum(self.within[0])

    def there(self, rows_RD: Tensor) -> Tensor:
        """Send rows in the order of their destination ranks; return them by source rank."""
        return _Hierarchical.apply(rows_RD, self, False)

    def back(self, rows_RD: Tensor) -> Tensor:
        """Return rows by source rank to where they came from, in the order they were sent in."""
        return _Hierarchical.apply(rows_RD, self, True)


def open_trip(
    counts_PE: Tensor, grid: Grid, timer: ExchangeTimer | None = None
) -> tuple[HierarchicalTrip, Tensor, list[list[int]]]:
    """Exchange counts over the grid and plan the rows' trip by them. Collective; one host read.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the grid.
        grid: the nodes.
        timer: of the rows' legs.

    Returns:
        trip: to send rows by.
        arriving_PE: [P, e] int64, rows from each rank for each expert here.
        arriving: the same on the host.
    """
    nodes, local = grid.nodes, grid.local
    leaving = counts_PE.view(nodes, local, -1)  # [N, L, e]
    gathered = _even(leaving.transpose(0, 1), grid.node_group)  # [L source, N, e]
    arriving = _even(gathered.transpose(0, 1), grid.rail_group)  # [N source, L source, e]
    arriving_PE = arriving.reshape(counts_PE.shape)
    leaving_NL, gathered_LN = leaving.sum(2), gathered.sum(2)
    host = torch.cat([leaving_NL.flatten(), gathered_LN.flatten(), arriving_PE.flatten()]).tolist()
    ranks, num_local = counts_PE.shape
    sent = _rows(host[:ranks], local)
    middle = _rows(host[ranks : 2 * ranks], nodes)
    received = _rows(host[2 * ranks :], num_local)
    by_rank = [sum(row) for row in received]
    trip = HierarchicalTrip(
        grid=grid,
        within=(_column_sums(sent), _row_sums(middle)),
        across=(_column_sums(middle), _row_sums(_rows(by_rank, local))),
        by_local=regroup_maps(leaving_NL, sum(host[:ranks])),
        by_node=regroup_maps(gathered_LN, sum(host[ranks : 2 * ranks])),
        timer=timer,
    )
    return trip, arriving_PE, received


def even_trip(
    rows_per_rank: int, grid: Grid, device: torch.device, timer: ExchangeTimer | None = None
) -> HierarchicalTrip:
    """Plan a trip on which every rank sends every other the same number of rows."""
    nodes, local = grid.nodes, grid.local
    counts_NL = torch.full((nodes, local), rows_per_rank, device=device)
    within = (nodes * rows_per_rank,) * local
    across = (local * rows_per_rank,) * nodes
    total = nodes * local * rows_per_rank
    return HierarchicalTrip(
        grid=grid,
        within=(within, within),
        across=(across, across),
        by_local=regroup_maps(counts_NL, total),
        by_node=regroup_maps(counts_NL.t(), total),
        timer=timer,
    )


class _Hierarchical(torch.autograd.Function):
    """Both directions are each other's inverse, and each other's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: HierarchicalTrip, backward: bool) -> Tensor:
        ctx.trip, ctx.backward_trip = trip, not backward
        return _travel(rows, trip, backward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        return _travel(drows, ctx.trip, ctx.backward_trip), None, None


def _travel(rows: Tensor, trip: HierarchicalTrip, backward: bool) -> Tensor:
    grid, timer = trip.grid, trip.timer
    if not backward:
        rows = rows.index_select(0, trip.by_local[0])
        rows = exchange_rows(rows, *trip.within, grid.node_group, timer)
        rows = rows.index_select(0, trip.by_node[0])
        return exchange_rows(rows, *trip.across, grid.rail_group, timer)
    (within_send, within_receive), (across_send, across_receive) = trip.within, trip.across
    rows = exchange_rows(rows, across_receive, across_send, grid.rail_group, timer)
    rows = rows.index_select(0, trip.by_node[1])
    rows = exchange_rows(rows, within_receive, within_send, grid.node_group, timer)
    return rows.index_select(0, trip.by_local[1])


def _even(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block i to rank i of the group; return what came, in the order of the ranks."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out


def _rows(numbers: list[int], width: int) -> list[list[int]]:
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def _row_sums(rows: list[list[int]]) -> Splits:
    return tuple(sum(row) for row in rows)


def _column_sums(rows: list[list[int]]) -> Splits:
    return tuple(sum(column) for column in zip(*rows, strict=True))
