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
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.parallel import background
from fairseq_tutel.parallel.call_id import NO_CALL_ID, CallId
from fairseq_tutel.parallel.collectives import all_gather, all_to_all, all_to_all_by
from fairseq_tutel.parallel.groups import Grid
from fairseq_tutel.parallel.regroup import chunk_of, regroup_maps
from fairseq_tutel.parallel.transfer import ExchangeTimer, pack, unpack

COUNTS_OPERATION = "the exchange of row counts"
Splits = tuple[int, ...]
Move = Callable[[Tensor], Tensor]


class Counts(NamedTuple):
    """The numbers of rows that an all-to-all sends and receives, by rank and expert, as int64 tensors."""

    leaving_PE: Tensor  # rows from this rank to each expert of each rank
    arriving_PE: Tensor  # rows from each rank to each local expert
    # Only for the hierarchical all-to-all: rows from each rank of this node to this local index of each
    # node.
    passing_LNE: Tensor | None = None
    # Only for a collective plan: rows from each rank to each expert of each rank.
    crossing_PPE: Tensor | None = None
    call_ids_P: Tensor | None = None

    def chunk(self, index: int, number: int) -> "Counts":
        """Split every block of rows into `number` chunks, and return the row counts of chunk `index`.

        All ranks split blocks in the same way.
        """
        if number == 1:
            return self
        blocks = (self.leaving_PE, self.arriving_PE, self.passing_LNE, self.crossing_PPE)
        chunks = (None if counts is None else chunk_of(counts, index, number) for counts in blocks)
        return Counts(*chunks)  # type: ignore[arg-type]

    def to_host(self) -> "Counts":
        """Return the counts in host memory; counts on a GPU are copied in one transfer."""
        if not self.leaving_PE.is_cuda:
            return self
        given = {key: c for key, c in self._asdict().items() if c is not None}
        host = torch.cat([c.reshape(-1) for c in given.values()]).cpu()
        parts = host.split([c.numel() for c in given.values()])
        return Counts(**{k: p.view(given[k].shape) for k, p in zip(given, parts, strict=True)})


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup, call_id: CallId = NO_CALL_ID) -> Counts:
    """Send each rank the number of rows that it will receive for each of its experts. Collective."""
    received = all_to_all(call_id.prepended_to(counts_PE), COUNTS_OPERATION, group)
    return Counts(counts_PE, received[:, 1 : 1 + counts_PE.shape[1]], call_ids_P=received[:, 0])


def exchange_counts_in_two_hops(counts_PE: Tensor, grid: Grid, call_id: CallId = NO_CALL_ID) -> Counts:
    """Exchange row counts in two hops: within each node, then between nodes. Collective."""
    own = slice(1, 1 + counts_PE.shape[1])
    leaving_NLX = call_id.prepended_to(counts_PE).view(grid.nodes, grid.local, -1)
    passing_LNX = all_to_all(leaving_NLX.transpose(0, 1).contiguous(), COUNTS_OPERATION, grid.node_group)
    received_NLX = all_to_all(passing_LNX.transpose(0, 1).contiguous(), COUNTS_OPERATION, grid.rail_group)
    received_PX = received_NLX.flatten(0, 1)
    return Counts(counts_PE, received_PX[:, own], passing_LNX[..., own], call_ids_P=received_PX[:, 0])


def exchange_all_counts(
    counts_PE: Tensor, group: dist.ProcessGroup, call_id: CallId = NO_CALL_ID
) -> Counts:
    """Gather the row counts of all pairs of ranks, which a collective plan needs. Collective."""
    received_PPX = all_gather(call_id.prepended_to(counts_PE), COUNTS_OPERATION, group)
    crossing_PPE = received_PPX[..., 1 : 1 + counts_PE.shape[1]]
    arriving_PE = crossing_PPE[:, dist.get_rank(group)]
    return Counts(counts_PE, arriving_PE, crossing_PPE=crossing_PPE, call_ids_P=received_PPX[:, 0, 0])


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """An all-to-all exchange of rows with known row counts, with methods for dispatch and combine.

    Error messages contain `name`.
    """

    transfer_dtype: str = "same"
    name: str = "the exchange of rows"
    timer: ExchangeTimer | None = None

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive rows in the transfer dtype, without autograd."""
        raise NotImplementedError

    def exchange(self, rows_RD: Tensor, combine: bool) -> Tensor:
        """Convert rows to the transfer dtype, exchange them, and convert them back, without autograd."""
        packed = pack(rows_RD, self.transfer_dtype).contiguous()
        if self.timer is None:
            received = self.move(packed, combine)
        else:
            received = self.timer.measure(packed, lambda: self.move(packed, combine))
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
        transfer = _Transfer(self, combine)
        return Started(_Start.apply(rows_RD, transfer), transfer)


class _Transfer:
    """Runs a dispatch or combine in the background, and later its backward pass."""

    def __init__(self, owner: AllToAll, combine: bool) -> None:
        self.owner, self.combine = owner, combine
        self.pending: list[background.Wait] = []

    def begin(self, rows: Tensor, combine: bool) -> None:
        owner = self.owner
        self.pending.append(background.start(lambda r: owner.exchange(r, combine), rows))

    def wait(self) -> Tensor:
        return self.pending.pop()()


class Started(NamedTuple):
    """An all-to-all that has started; `finish` waits for it and returns the received rows.

    The token has no elements: it connects `finish` to the autograd graph.
    """

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
    """Autograd function: forward starts a transfer, and backward waits for the transfer of gradients.

    Forward of `_Finish` waits for the first transfer, and its backward starts the second.
    """

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


class Hop(NamedTuple):
    """One exchange of rows within a group, with functions that reorder rows before and after it."""

    group: dist.ProcessGroup
    send: Splits
    receive: Splits
    forth: Move = lambda rows: rows
    back: Move = lambda rows: rows


@dataclass(frozen=True, kw_only=True)
class HopAllToAll(AllToAll):
    """An all-to-all in one hop (linear), or in two hops: within nodes, then between nodes (2DH)."""

    hops: tuple[Hop, ...]

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive rows in the transfer dtype."""
        rows = sent_RX
        if combine:
            for group, send, receive, _, back in reversed(self.hops):
                rows = back(all_to_all(rows, self.name, group, receive=send, send=receive))
        else:
            for group, send, receive, forth, _ in self.hops:
                rows = all_to_all(forth(rows), self.name, group, receive, send)
        return rows


def linear_all_to_all(host: Counts, group: dist.ProcessGroup, **options: Any) -> HopAllToAll:
    """Return an all-to-all in one hop for given row counts; `options` are the fields of `AllToAll`."""
    return HopAllToAll(hops=(Hop(group, _splits(host.leaving_PE), _splits(host.arriving_PE)),), **options)


def hierarchical_all_to_all(device: Counts, host: Counts, grid: Grid, **options: Any) -> HopAllToAll:
    """Return an all-to-all within nodes, then between nodes; `options` are the fields of `AllToAll`."""
    assert device.passing_LNE is not None and host.passing_LNE is not None
    nodes, local = grid.nodes, grid.local
    leaving_NL = host.leaving_PE.sum(1).view(nodes, local)
    arriving_NL = host.arriving_PE.sum(1).view(nodes, local)
    passing_LN = host.passing_LNE.sum(2)
    by_local = _regrouping(device.leaving_PE.sum(1).view(nodes, local), leaving_NL)
    by_node = _regrouping(device.passing_LNE.sum(2), passing_LN)
    within = Hop(grid.node_group, _splits(leaving_NL.t()), _splits(passing_LN), *by_local)
    across = Hop(grid.rail_group, _splits(passing_LN.t()), _splits(arriving_NL), *by_node)
    return HopAllToAll(hops=(within, across), **options)


@dataclass(frozen=True, kw_only=True)
class PlannedAllToAll(AllToAll):
    """An all-to-all that runs a collective plan, which is a program of puts, waits and copies.

    The plan's chunks are blocks of rows.
    """

    group: dist.ProcessGroup
    plan: str
    crossing_PP: tuple[Splits, ...]  # of all ranks: a plan may forward rows through any rank

    @classmethod
    def of(cls, host: Counts, group: dist.ProcessGroup, plan: str, **options: Any) -> Self:
        """Return an all-to-all that uses collective plan `plan`; `options` are the fields of `AllToAll`."""
        assert host.crossing_PPE is not None
        rows = host.crossing_PPE.sum(2).tolist()
        return cls(group=group, plan=plan, crossing_PP=tuple(map(tuple, rows)), **options)

    def move(self, sent_RX: Tensor, combine: bool) -> Tensor:
        """Send and receive rows in the transfer dtype."""
        sizes = tuple(zip(*self.crossing_PP, strict=True)) if combine else self.crossing_PP
        return all_to_all_by(self.plan, sent_RX, self.name, self.group, sizes)


def _splits(counts_AX: Tensor) -> Splits:
    return tuple(counts_AX.sum(1).tolist())


def _regrouping(counts_AB: Tensor, host_AB: Tensor) -> tuple[Move, Move]:
    """Return two functions that transpose a matrix of blocks of rows, from (a, b) to (b, a), and back."""
    # Blocks of equal size, such as padded buffers, need no row maps.
    if bool((host_AB == host_AB[0, 0]).all()):
        outer, inner = host_AB.shape

        def copy(rows: Tensor, outer: int, inner: int) -> Tensor:
            blocks = rows.reshape(outer, inner, len(rows) // (outer * inner), *rows.shape[1:])
            return blocks.transpose(0, 1).reshape(rows.shape)

        return lambda rows: copy(rows, outer, inner), lambda rows: copy(rows, inner, outer)
    forth, back = regroup_maps(counts_AB, int(host_AB.sum()))
    return lambda rows: rows.index_select(0, forth), lambda rows: rows.index_select(0, back)
