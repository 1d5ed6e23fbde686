"""All-to-all of rows with autograd: dispatch to other ranks, and combine, its inverse and its backward.

R rows, D model_dim, P ranks of the group, which may be N nodes of L: rank = n * L + l. Blocks of rows may
be ragged or even. The subclasses of `AllToAll` move rows in one hop, in two, or by a collective plan.

The hierarchical all-to-all (2DH) sends within nodes first and then between them, so that few messages cross
nodes. Rank (n, l) first sends its rows for (n', l') to its neighbour (n, l'), together with all rows of the
node for local index l'. From there they go to node n' in one message. A rank sends N - 1 messages to other
nodes instead of P - L, each L times as large. The result is bit-identical to the linear all-to-all.
Source: Tutel (Hwang et al. 2023), section 3.4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.comm import background
from fairseq_tutel.comm.collectives import all_to_all, all_to_all_by
from fairseq_tutel.comm.counts import Counts
from fairseq_tutel.comm.regroup import regroup_maps
from fairseq_tutel.comm.transfer import ExchangeTimer, pack, unpack
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.ranks.groups import Grid

Splits = tuple[int, ...]
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """One exchange of rows with known counts: dispatch and combine.

    Attributes:
        transfer_dtype: see `transfer.pack`.
        name: names the exchange in error messages.
        timer: adds the time of both directions and of their backward; None to measure nothing.
    """

    transfer_dtype: str = "same"
    name: str = "the exchange of rows"
    timer: ExchangeTimer | None = None

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive packed rows, without autograd."""
        raise NotImplementedError

    def exchange(self, rows_RD: Tensor, combine: bool) -> Tensor:
        """Pack, move and unpack rows, without autograd."""
        packed = pack(rows_RD, self.transfer_dtype).contiguous()
        return unpack(self.move(packed, combine), self.transfer_dtype, rows_RD.dtype)

    def dispatch(self, rows_RD: Tensor) -> Tensor:
        """Send rows in the order of their destination ranks; return the received rows by source rank."""
        return _AllToAll.apply(rows_RD, self, False)

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Send rows, by source rank, back; return them in the order in which they were dispatched."""
        return _AllToAll.apply(rows_RD, self, True)

    def start(self, rows_RD: Tensor, combine: bool) -> "Started":
        """Begin `dispatch` or `combine` in parallel to the computation."""
        transfer = _Transfer(self, combine)
        return Started(_Start.apply(rows_RD, transfer), transfer)


class _Transfer:
    """A direction of an all-to-all that runs in the background: forward, and later its backward."""

    def __init__(self, owner: AllToAll, combine: bool) -> None:
        self.owner, self.combine = owner, combine
        self.pending: list[background.Pending] = []

    def begin(self, rows: Tensor, combine: bool) -> None:
        """Start to move rows."""
        owner = self.owner
        self.pending.append(background.start(lambda r: owner.exchange(r, combine), rows))

    def wait(self) -> Tensor:
        """Wait for the rows and return them."""
        return self.pending.pop().result()


class Started(NamedTuple):
    """An all-to-all under way. The token has no elements; it carries the autograd graph to `finish`."""

    token: Tensor
    transfer: _Transfer

    def finish(self) -> Tensor:
        """Wait for the rows and return them."""
        return _Finish.apply(self.token, self.transfer)


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
    """Forward begins the transfer that `_Finish` waits for; backward waits for the one it began."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.begin(rows, transfer.combine)
        return rows.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.begin(drows, not ctx.transfer.combine)
        return drows.new_empty(0), None


@dataclass(frozen=True, kw_only=True)
class LinearAllToAll(AllToAll):
    """Every rank sends to every other rank, in one hop.

    Attributes:
        group: the ranks.
        send: P numbers, rows for each rank.
        receive: P numbers, rows from each rank.
    """

    group: dist.ProcessGroup
    send: Splits
    receive: Splits

    @classmethod
    def of(cls, host: Counts, group: dist.ProcessGroup, **options: Any) -> Self:
        """Return the all-to-all of these counts; `options` are the fields of `AllToAll`."""
        return cls(
            group=group,
            send=tuple(host.leaving_PE.sum(1).tolist()),
            receive=tuple(host.arriving_PE.sum(1).tolist()),
            **options,
        )

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive packed rows."""
        splits = (self.receive, self.send) if combine else (self.send, self.receive)
        return _exchange_rows(sent_RX, *splits, self.group, self)


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllToAll(AllToAll):
    """Rows go in two hops: within the node, then between nodes.

    Attributes:
        grid: the nodes.
        within: (send, receive) rows of the hop inside the node, L numbers each.
        across: (send, receive) rows of the hop between nodes, N numbers each.
        by_local: moves rows from (node, local) order of their destination to (local, node) order, and back.
        by_node: moves rows from (source local, node) order to (node, source local) order, and back.
    """

    grid: Grid
    within: tuple[Splits, Splits]
    across: tuple[Splits, Splits]
    by_local: tuple[Move, Move]
    by_node: tuple[Move, Move]

    @classmethod
    def of(cls, device: Counts, host: Counts, grid: Grid, backend: str = "auto", **options: Any) -> Self:
        """Return the all-to-all of these counts; `options` are the fields of `AllToAll`."""
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

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive packed rows, within the node and between nodes."""
        rows = sent_RX
        if not combine:
            rows = self._within(self.by_local[0](rows), *self.within)
            return self._across(self.by_node[0](rows), *self.across)
        (send, receive), (send_across, receive_across) = self.within, self.across
        rows = self.by_node[1](self._across(rows, receive_across, send_across))
        return self.by_local[1](self._within(rows, receive, send))

    def _within(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return _exchange_rows(rows, send, receive, self.grid.node_group, self)

    def _across(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        return _exchange_rows(rows, send, receive, self.grid.rail_group, self)


@dataclass(frozen=True, kw_only=True)
class PlannedAllToAll(AllToAll):
    """Rows are sent by a collective plan of an all_to_all, whose chunks are blocks of rows.

    Attributes:
        group: the ranks.
        plan: by its name.
        crossing_PP: rows from every rank to every rank, since a plan may forward rows through any rank.
    """

    group: dist.ProcessGroup
    plan: str
    crossing_PP: tuple[Splits, ...]

    @classmethod
    def of(cls, host: Counts, group: dist.ProcessGroup, plan: str, **options: Any) -> Self:
        """Return the all-to-all of these counts; `options` are the fields of `AllToAll`."""
        assert host.crossing_PPE is not None
        rows = host.crossing_PPE.sum(2).tolist()
        return cls(group=group, plan=plan, crossing_PP=tuple(map(tuple, rows)), **options)

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive packed rows."""
        sizes = tuple(zip(*self.crossing_PP, strict=True)) if combine else self.crossing_PP

        def move() -> Tensor:
            return all_to_all_by(self.plan, sent_RX, self.name, self.group, sizes)

        return move() if self.timer is None else self.timer.measure(sent_RX, move)


def _regrouping(counts_AB: Tensor, host_AB: Tensor, backend: str) -> tuple[Move, Move]:
    """Return functions that move blocks of rows from (a, b) order to (b, a) order, and back.

    Even blocks, as in padded buffers, are a copy with other strides; others need maps.
    """
    if bool((host_AB == host_AB[0, 0]).all()):
        outer, inner = host_AB.shape

        def copy(rows: Tensor, outer: int, inner: int) -> Tensor:
            return kernels.ops(backend, rows.device).stride_copy(rows, outer, inner)

        return lambda rows: copy(rows, outer, inner), lambda rows: copy(rows, inner, outer)
    forth, back = regroup_maps(counts_AB, int(host_AB.sum()))
    return lambda rows: rows.index_select(0, forth), lambda rows: rows.index_select(0, back)


def _exchange_rows(
    rows: Tensor, send: Splits, receive: Splits, group: dist.ProcessGroup, owner: AllToAll
) -> Tensor:
    """Send the next send[p] rows to rank p of the group; return the received rows by source rank."""

    def move() -> Tensor:
        return all_to_all(rows, owner.name, group, receive, send)

    return move() if owner.timer is None else owner.timer.measure(rows, move)
