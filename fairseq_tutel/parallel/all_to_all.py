"""All-to-all exchanges of row counts and token rows, with autograd for dispatch and combine.

Dispatch sends rows to the ranks of their experts, and combine sends them back. Each is the backward pass of
the other.

R rows, D model_dim, e local experts. The group has P ranks, or N nodes of L ranks: rank = n * L + l.

The hierarchical all-to-all (2DH) first sends rows within each node, so few messages cross nodes. Rank
(n, l) sends its rows for rank (n', l') to rank (n, l'). That rank collects the rows of its node for rank
(n', l') and sends them in one message. Each rank sends N - 1 messages to other nodes instead of P - L.
Each message is L times as large, and the result is the same.
Source: Tutel (Hwang et al. 2023), section 3.4.
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
    """The numbers of rows of an exchange, int64 [P, P, e]: from each rank to each expert of each rank."""

    crossing_PPE: Tensor
    rank: int  # this rank

    @property
    def leaving(self) -> Tensor:
        """The numbers of rows from this rank to each expert of each rank [P, e]."""
        return self.crossing_PPE[self.rank]

    @property
    def arriving(self) -> Tensor:
        """The numbers of rows from each rank to each local expert [P, e]."""
        return self.crossing_PPE[:, self.rank]

    def passing(self, grid: Grid) -> Tensor:
        """Return the numbers of rows from each rank of this node to my local index of each node [L, N]."""
        counts_NLNL = self.crossing_PPE.sum(2).view(grid.nodes, grid.local, grid.nodes, grid.local)
        node, local = divmod(self.rank, grid.local)
        return counts_NLNL[node, :, :, local]

    def chunk(self, index: int, number: int) -> "Counts":
        """Split every block of rows into `number` chunks, and return the row counts of chunk `index`.

        All ranks split blocks in the same way.
        """
        return self if number == 1 else Counts(chunk_of(self.crossing_PPE, index, number), self.rank)


def exchange_counts(
    counts_PE: Tensor, group: dist.ProcessGroup, operation: str, call_id: CallId
) -> tuple[Counts, Counts]:
    """Gather the row counts of all ranks, and compare call IDs. Collective.

    Returns the counts on the device and on the host.
    """
    rank, own = dist.get_rank(group), slice(1, 1 + counts_PE.shape[1])
    received_PPX = all_gather(call_id.prepended_to(counts_PE), "the exchange of row counts", group)
    host_PPX = received_PPX.cpu()
    compare(host_PPX[:, 0, 0], operation, group)
    return Counts(received_PPX[..., own], rank), Counts(host_PPX[..., own], rank)


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """An all-to-all exchange of rows with known row counts, with methods for dispatch and combine.

    `forth` sends rows in the transfer dtype, without autograd, and returns the received rows. `back` sends
    them back.
    """

    forth: Move
    back: Move
    transfer_dtype: str = "same"
    timer: ExchangeTimer | None = None

    def exchange(self, rows_RD: Tensor, combine: bool) -> Tensor:
        """Convert rows to the transfer dtype, exchange them, and convert them back, without autograd."""
        packed = pack(rows_RD, self.transfer_dtype).contiguous()
        move = self.back if combine else self.forth
        timer = self.timer
        received = move(packed) if timer is None else timer.measure(packed, lambda: move(packed))
        return unpack(received, self.transfer_dtype, rows_RD.dtype)

    def dispatch(self, rows_RD: Tensor) -> Tensor:
        """Send rows, sorted by destination rank; return the received rows, sorted by source rank."""
        return _AllToAll.apply(rows_RD, self, False)

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Send rows back to their source ranks; return this rank's rows in the order of their dispatch.

        The input is sorted by source rank.
        """
        return _AllToAll.apply(rows_RD, self, True)

    def start(self, rows_RD: Tensor, combine: bool) -> "Started":
        """Start `dispatch` or `combine` in the background; `Started.finish` returns the rows."""
        return Started(self, combine, rows_RD)


class Started:
    """A dispatch or combine that runs in the background, and later its backward pass."""

    def __init__(self, owner: AllToAll, combine: bool, rows_RD: Tensor) -> None:
        self.owner, self.combine = owner, combine
        self.pending: list[background.Wait] = []
        # A tensor without elements, which connects `finish` to the autograd graph.
        self.tokens = [_Start.apply(rows_RD, self)]

    def begin(self, rows: Tensor, combine: bool) -> None:
        """Start the exchange of rows, or of their gradients."""
        self.pending.append(background.start(lambda r: self.owner.exchange(r, combine), rows))

    def wait(self) -> Tensor:
        """Wait for the rows that `begin` sent, and return the received rows."""
        return self.pending.pop()()

    def finish(self) -> Tensor:
        """Wait for the rows and return them."""
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
    """Autograd function: forward starts a transfer, and backward waits for the transfer of gradients.

    Forward of `_Finish` waits for the first transfer, and its backward starts the second.
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
    send, receive = _splits(host.leaving), _splits(host.arriving)
    return (
        lambda rows: all_to_all(rows, operation, group, receive, send),
        lambda rows: all_to_all(rows, operation, group, send, receive),
    )


def hierarchical(device: Counts, host: Counts, grid: Grid, operation: str) -> tuple[Move, Move]:
    """Return the functions `forth` and `back` of an all-to-all within nodes, then between nodes."""
    shape = grid.nodes, grid.local
    leaving_NL = host.leaving.sum(1).view(shape)
    passing_LN = host.passing(grid)
    by_local, by_node_rank = _regrouping(device.leaving.sum(1).view(shape), leaving_NL)
    by_node, by_local_rank = _regrouping(device.passing(grid), passing_LN)
    send_within, receive_within = _splits(leaving_NL.t()), _splits(passing_LN)
    send_across, receive_across = _splits(passing_LN.t()), _splits(host.arriving.sum(1).view(shape))

    def forth(rows: Tensor) -> Tensor:
        rows = all_to_all(by_local(rows), operation, grid.node_group, receive_within, send_within)
        return all_to_all(by_node(rows), operation, grid.rail_group, receive_across, send_across)

    def back(rows: Tensor) -> Tensor:
        rows = all_to_all(rows, operation, grid.rail_group, send_across, receive_across)
        rows = all_to_all(by_local_rank(rows), operation, grid.node_group, send_within, receive_within)
        return by_node_rank(rows)

    return forth, back


def planned(host: Counts, group: dist.ProcessGroup, plan: str, operation: str) -> tuple[Move, Move]:
    """Return the functions `forth` and `back` of an all-to-all by the collective plan of this name.

    The plan's chunks are blocks of rows. It may forward rows through any rank.
    """
    sizes_PP = tuple(map(tuple, host.crossing_PPE.sum(2).tolist()))
    reverse_PP = tuple(zip(*sizes_PP, strict=True))
    return (
        lambda rows: all_to_all_by(plan, rows, operation, group, sizes_PP),
        lambda rows: all_to_all_by(plan, rows, operation, group, reverse_PP),
    )


def _splits(counts_AX: Tensor) -> Splits:
    return tuple(counts_AX.sum(1).tolist())


def _regrouping(counts_AB: Tensor, host_AB: Tensor) -> tuple[Move, Move]:
    """Return two functions that transpose a matrix of blocks of rows, from (a, b) to (b, a), and back."""
    forth, back = regroup_maps(counts_AB, int(host_AB.sum()))
    return lambda rows: rows.index_select(0, forth), lambda rows: rows.index_select(0, back)
