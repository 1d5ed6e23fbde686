"""All-to-all exchanges of row counts and token rows, with autograd for dispatch and combine.

Dispatch sends rows to the ranks of their experts, and combine sends the outputs back. The backward pass of
dispatch is a combine, and the backward pass of combine is a dispatch.

Shapes use R for rows, D for model_dim and e for the local experts of a rank. An EP group has P ranks on N
nodes of L ranks. Rank (n, l), which is rank n * L + l of the group, is the l-th rank of node n.

The hierarchical all-to-all (2DH) first sends rows within each node, so that few messages cross nodes. In
the first hop, rank (n, l) sends its rows for rank (n', l') to rank (n, l'). In the second hop, rank (n, l')
sends all rows of node n for rank (n', l') in one message. Each rank sends N - 1 messages to other nodes in
2DH, and P - L messages in a linear all-to-all. Section 3.4 of Tutel (Hwang et al. 2023) describes 2DH.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.parallel import background
from fairseq_tutel.parallel.call_id import CallId, compare
from fairseq_tutel.parallel.collectives import all_gather, all_to_all, all_to_all_by
from fairseq_tutel.parallel.groups import Grid
from fairseq_tutel.parallel.regroup import chunk_of, regroup_maps
from fairseq_tutel.parallel.transfer import ExchangeTimer, pack, unpack

Move = Callable[[Tensor], Tensor]
Splits = tuple[int, ...]


class Counts(NamedTuple):
    """The int64 numbers of rows that an all-to-all exchange sends and receives."""

    leaving_PE: Tensor  # The rows from this rank to each local expert of each rank.
    arriving_PE: Tensor  # The rows from each rank to each local expert of this rank.
    # In 2DH [L, N, e]: the rows from each rank of this node to each rank with this rank's local index. With
    # a collective plan [P, P, e]: the rows from each rank to each rank. Otherwise, the tensor is empty.
    transit: Tensor

    def chunk(self, index: int, number: int) -> "Counts":
        """Split every block of rows into `number` chunks, and return the row counts of chunk `index`.

        All ranks split their blocks of rows in the same way.
        """
        return self if number == 1 else Counts(*(chunk_of(counts, index, number) for counts in self))


def exchange_counts(
    counts_PE: Tensor,
    group: dist.ProcessGroup,
    operation: str,
    call_id: CallId,
    grid: Grid | None = None,
    every_pair: bool = False,
) -> tuple[Counts, Counts]:
    """Send each rank the number of rows for each of its experts, and compare call IDs. Collective.

    Return the row counts on the device and on the host. The host waits for the device once. With `grid`,
    ranks send row counts in two hops. With `every_pair`, which only collective plans need, a rank receives
    P * P * e counts. Without `every_pair`, a rank receives P * e counts per hop.
    """
    what, rank = "the exchange of row counts", dist.get_rank(group)
    leaving_PX = call_id.prepended_to(counts_PE)
    transit = leaving_PX[:0]
    if every_pair:
        transit = all_gather(leaving_PX, what, group)
        arriving_PX = transit[:, rank]
    elif grid is None:
        arriving_PX = all_to_all(leaving_PX, what, group)
    else:
        leaving_LNX = leaving_PX.view(grid.nodes, grid.local, -1).transpose(0, 1).contiguous()
        transit = all_to_all(leaving_LNX, what, grid.node_group)
        arriving_PX = all_to_all(transit.transpose(0, 1).contiguous(), what, grid.rail_group).flatten(0, 1)
    device = leaving_PX, arriving_PX, transit
    pieces = torch.cat([counts.flatten() for counts in device]).cpu().split([c.numel() for c in device])
    host = [piece.view(counts.shape) for piece, counts in zip(pieces, device, strict=True)]
    compare(host[1][:, 0], operation, group)
    own = slice(1, 1 + counts_PE.shape[1])
    return Counts(*(c[..., own] for c in device)), Counts(*(c[..., own] for c in host))


def even_counts(leaving_PE: Tensor, rank: int, grid: Grid | None, every_pair: bool) -> Counts:
    """Return the row counts of `exchange_counts` without communication; all ranks have equal counts."""
    transit = leaving_PE.expand(len(leaving_PE) if every_pair else 0, -1, -1)
    if grid is not None:
        for_my_rail = leaving_PE.view(grid.nodes, grid.local, -1)[:, rank % grid.local]
        transit = for_my_rail.expand(grid.local, -1, -1)
    return Counts(leaving_PE, leaving_PE[rank].expand_as(leaving_PE), transit)


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """An all-to-all exchange of rows with fixed row counts.

    `forth` sends rows in the transfer dtype, without autograd, and returns the received rows. `back` sends
    the rows back to their source ranks.
    """

    forth: Move
    back: Move
    transfer_dtype: str = "same"
    timer: ExchangeTimer | None = None

    def exchange(self, rows_RD: Tensor, combine: bool) -> Tensor:
        """Exchange rows in the transfer dtype. Return the received rows in the dtype of `rows_RD`."""
        packed = pack(rows_RD, self.transfer_dtype).contiguous()
        move = self.back if combine else self.forth
        timer = self.timer
        received = move(packed) if timer is None else timer.measure(packed, lambda: move(packed))
        return unpack(received, self.transfer_dtype, rows_RD.dtype)

    def dispatch(self, rows_RD: Tensor) -> Tensor:
        """Send rows, sorted by destination rank; return the received rows, sorted by source rank."""
        return _AllToAll.apply(rows_RD, self, False)

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Send rows back to their source ranks; return this rank's rows in the order before dispatch.

        The input rows are sorted by source rank.
        """
        return _AllToAll.apply(rows_RD, self, True)

    def start(self, rows_RD: Tensor, combine: bool) -> "Started":
        """Start a dispatch or combine in the background; `Started.finish` waits and returns the rows."""
        return Started(self, combine, rows_RD)


class Started:
    """A dispatch or combine that runs in the background, in the forward pass and in the backward pass."""

    def __init__(self, owner: AllToAll, combine: bool, rows_RD: Tensor) -> None:
        self.owner, self.combine = owner, combine
        self.pending: list[background.Wait] = []
        # This empty tensor connects the output of `finish` to `rows_RD` in the autograd graph.
        self.tokens = [_Start.apply(rows_RD, self)]

    def begin(self, rows: Tensor, combine: bool) -> None:
        """Start the exchange of rows, or in the backward pass the exchange of their gradients."""
        self.pending.append(background.start(lambda r: self.owner.exchange(r, combine), rows))

    def wait(self) -> Tensor:
        """Wait for the exchange that `begin` started, and return the received rows."""
        return self.pending.pop()()

    def finish(self) -> Tensor:
        """Wait for the background exchange, and return the received rows with autograd."""
        return _Finish.apply(self.tokens.pop(), self)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, owner: AllToAll, combine: bool) -> Tensor:
        ctx.owner, ctx.combine = owner, combine
        return owner.exchange(rows, combine)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.owner.exchange(drows, not ctx.combine), None, None


class _Start(torch.autograd.Function):
    """Autograd function whose forward starts a transfer and whose backward waits for the gradients.

    `_Finish` waits for the rows in its forward pass, and sends their gradients in its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Started) -> Tensor:
        ctx.transfer = transfer
        transfer.begin(rows, transfer.combine)
        return rows.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: Started) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.begin(drows, not ctx.transfer.combine)
        return drows.new_empty(0), None


def linear(host: Counts, group: dist.ProcessGroup, operation: str) -> tuple[Move, Move]:
    """Return the functions `forth` and `back` of an all-to-all in one hop."""
    send, receive = _splits(host.leaving_PE), _splits(host.arriving_PE)
    return (
        lambda rows: all_to_all(rows, operation, group, receive, send),
        lambda rows: all_to_all(rows, operation, group, send, receive),
    )


def hierarchical(device: Counts, host: Counts, grid: Grid, operation: str) -> tuple[Move, Move]:
    """Return the functions `forth` and `back` of an all-to-all within nodes and then between nodes."""
    shape = grid.nodes, grid.local
    leaving_NL = host.leaving_PE.sum(1).view(shape)
    passing_LN = host.transit.sum(2)
    by_local, by_node_rank = _regrouping(device.leaving_PE.sum(1).view(shape), leaving_NL)
    by_node, by_local_rank = _regrouping(device.transit.sum(2), passing_LN)
    send_within, receive_within = _splits(leaving_NL.t()), _splits(passing_LN)
    send_across, receive_across = _splits(passing_LN.t()), _splits(host.arriving_PE.sum(1).view(shape))

    def forth(rows: Tensor) -> Tensor:
        rows = all_to_all(by_local(rows), operation, grid.node_group, receive_within, send_within)
        return all_to_all(by_node(rows), operation, grid.rail_group, receive_across, send_across)

    def back(rows: Tensor) -> Tensor:
        rows = all_to_all(rows, operation, grid.rail_group, send_across, receive_across)
        rows = all_to_all(by_local_rank(rows), operation, grid.node_group, send_within, receive_within)
        return by_node_rank(rows)

    return forth, back


def planned(host: Counts, group: dist.ProcessGroup, plan: str, operation: str) -> tuple[Move, Move]:
    """Return the functions `forth` and `back` of an all-to-all by the named collective plan.

    A chunk of the plan is the block of rows from one rank to another. Other ranks may forward this block.
    """
    sizes_PP = tuple(map(tuple, host.transit.sum(2).tolist()))
    reverse_PP = tuple(zip(*sizes_PP, strict=True))
    return (
        lambda rows: all_to_all_by(plan, rows, operation, group, sizes_PP),
        lambda rows: all_to_all_by(plan, rows, operation, group, reverse_PP),
    )


def _splits(counts_AX: Tensor) -> Splits:
    return tuple(counts_AX.sum(1).tolist())


def _regrouping(counts_AB: Tensor, host_AB: Tensor) -> tuple[Move, Move]:
    """Return a function that transposes an (a, b) matrix of row blocks, and the inverse function."""
    (a, b), size = host_AB.shape, int(host_AB[0, 0])
    if bool((host_AB == size).all()):  # Blocks of equal size need no index maps.

        def transposed(rows: Tensor, outer: int, inner: int) -> Tensor:
            return rows.unflatten(0, (outer, inner, size)).transpose(0, 1).flatten(0, 2)

        return lambda rows: transposed(rows, a, b), lambda rows: transposed(rows, b, a)
    forth, back = regroup_maps(counts_AB, int(host_AB.sum()))
    return lambda rows: rows.index_select(0, forth), lambda rows: rows.index_select(0, back)
