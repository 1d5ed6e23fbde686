"""Row counts of one exchange: how many rows every rank sends and receives, agreed before rows are sent.

P ranks of the group, which may be N nodes of L, e local experts, X columns that are sent.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.comm.call_id import NO_CALL_ID, CallId
from fairseq_tutel.comm.collectives import all_gather, all_to_all
from fairseq_tutel.ranks.groups import Grid

OPERATION = "the exchange of row counts"


class Counts(NamedTuple):
    """Rows of every block of one exchange, int64.

    Attributes:
        leaving_PE: from this rank for each expert of each rank.
        arriving_PE: from each rank for each expert here.
        passing_LNE: from each rank of this node for this local index of each node; only for the
            hierarchical all-to-all.
        crossing_PPE: from each rank for each expert of each rank; only for a collective plan.
        call_ids_P: the call ID of each rank if it was sent with the counts.
    """

    leaving_PE: Tensor
    arriving_PE: Tensor
    passing_LNE: Tensor | None = None
    crossing_PPE: Tensor | None = None
    call_ids_P: Tensor | None = None

    def chunk(self, index: int, number: int) -> "Counts":
        """Return the counts of chunk `index` of `number`: all ranks cut every block in the same way."""
        if number == 1:
            return self
        blocks = (self.leaving_PE, self.arriving_PE, self.passing_LNE, self.crossing_PPE)
        chunks = (None if counts is None else chunk_of(counts, index, number) for counts in blocks)
        return Counts(*chunks)  # type: ignore[arg-type]

    def to_host(self) -> "Counts":
        """Return the same counts on the host, copied in one read."""
        if not self.leaving_PE.is_cuda:
            return self
        given = {key: c for key, c in self._asdict().items() if c is not None}
        host = torch.cat([c.reshape(-1) for c in given.values()]).cpu()
        parts = host.split([c.numel() for c in given.values()])
        return Counts(**{k: p.view(given[k].shape) for k, p in zip(given, parts, strict=True)})


def chunk_of(count: Tensor, index: int, number: int) -> Tensor:
    """Return the size of chunk `index` of `number` of a block; sizes differ by at most one."""
    return count * (index + 1) // number - count * index // number


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup, call_id: CallId = NO_CALL_ID) -> Counts:
    """Send every rank the number of rows for each of its experts. Collective."""
    received = all_to_all(call_id.prepended_to(counts_PE), OPERATION, group)
    return Counts(counts_PE, received[:, 1 : 1 + counts_PE.shape[1]], call_ids_P=received[:, 0])


def exchange_counts_in_two_hops(counts_PE: Tensor, grid: Grid, call_id: CallId = NO_CALL_ID) -> Counts:
    """Send the counts as `exchange_counts` does, in two hops: the counts of a hierarchical all-to-all."""
    own = slice(1, 1 + counts_PE.shape[1])
    leaving_NLX = call_id.prepended_to(counts_PE).view(grid.nodes, grid.local, -1)
    passing_LNX = all_to_all(leaving_NLX.transpose(0, 1).contiguous(), OPERATION, grid.node_group)
    received_NLX = all_to_all(passing_LNX.transpose(0, 1).contiguous(), OPERATION, grid.rail_group)
    received_PX = received_NLX.flatten(0, 1)
    return Counts(counts_PE, received_PX[:, own], passing_LNX[..., own], call_ids_P=received_PX[:, 0])


def exchange_all_counts(
    counts_PE: Tensor, group: dist.ProcessGroup, call_id: CallId = NO_CALL_ID
) -> Counts:
    """Send every rank the counts of all pairs of ranks: a collective plan needs them. Collective."""
    received_PPX = all_gather(call_id.prepended_to(counts_PE), OPERATION, group)
    crossing_PPE = received_PPX[..., 1 : 1 + counts_PE.shape[1]]
    arriving_PE = crossing_PPE[:, dist.get_rank(group)]
    return Counts(counts_PE, arriving_PE, crossing_PPE=crossing_PPE, call_ids_P=received_PPX[:, 0, 0])
