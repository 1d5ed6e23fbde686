"""Linear all-to-all of rows, ragged or even: every rank sends to every other.

R rows, D model_dim, P ranks of the group, e experts of a rank.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.comm.stamp import NO_STAMP, Stamp
from fairseq_tutel.comm.trip import Counts, Trip
from fairseq_tutel.ranks.guard import guarded

Splits = tuple[int, ...]


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


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup, stamp: Stamp = NO_STAMP) -> Counts:
    """Tell every rank how many rows it is to be sent for each of its experts. Collective.

    Args:
        counts_PE: [P, e] int64, rows for each expert of each rank of the group.
        group: the ranks.
        stamp: of this call, which goes along.
    """
    came = even_exchange(stamp.beside(counts_PE), group)
    return Counts(counts_PE, came[:, 1 : 1 + counts_PE.shape[1]], stamps_P=came[:, 0])


def even_exchange(
    blocks: Tensor, group: dist.ProcessGroup, operation: str = "the exchange of row counts"
) -> Tensor:
    """Send block i to rank i of the group; return what came, in the order of the ranks."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    with guarded(operation, group):
        dist.all_to_all_single(out, blocks, group=group)
    return out


def exchange_rows(
    rows: Tensor, send: Splits, receive: Splits, group: dist.ProcessGroup, trip: Trip
) -> Tensor:
    """Send the next send[p] rows to rank p of the group; return what all ranks sent, by source.

    The trip that this is a leg of gives its name to errors, and its timer.
    """
    out = rows.new_empty(sum(receive), *rows.shape[1:])

    def collective() -> None:
        with guarded(trip.name, group):
            dist.all_to_all_single(out, rows, list(receive), list(send), group=group)

    if trip.timer is None:
        collective()
    else:
        trip.timer.measure(rows, collective)
    return out
