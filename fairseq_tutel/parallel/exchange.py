"""The exchange sends rows to the ranks that own their experts, runs the experts, and returns the outputs.

Shapes use R for rows, D for model_dim, E for experts (e of them local), P for ranks of the EP group, and C
for slots per expert. Rows may be sent in chunks while the experts compute earlier chunks. With three
chunks, the forward pass runs dispatch (d), experts (x) and combine (c) of each chunk in this order:

    exchange  d0 d1 d2 c0 c1 c2
    experts      x0 x1 x2

The backward pass runs in the reverse order. The overlap is from Tutel (Hwang et al. 2023), section 3.3.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.parallel.all_to_all import (
    AllToAll,
    Counts,
    even_counts,
    exchange_counts,
    hierarchical,
    linear,
    planned,
)
from fairseq_tutel.parallel.call_id import CallId
from fairseq_tutel.parallel.groups import Grid
from fairseq_tutel.parallel.regroup import (
    destinations,
    gather,
    permute,
    regroup_maps,
    repeat_blocks,
    sum_copies,
)
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.parallel.transfer import ExchangeTimer

# A function that runs the local experts on rows sorted by source rank, and returns outputs in this order.
# The arguments are rows, row counts, an index map that sorts the rows by expert, and the inverse map.
ExpertFn = Callable[[Tensor, Groups, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of a layer's row exchange: process group, strategy, and transfer dtype."""

    group: dist.ProcessGroup
    grid: Grid | None = None  # The nodes of the EP group, for the algorithm 2dh.
    strategy: Strategy = field(default_factory=Strategy)  # adaptive_r is at least 1.
    slices: int = 1  # s, the number of ranks over which an expert is sharded.
    padded: bool = False  # Whether every expert has equally many rows on every rank.
    transfer_dtype: str = "same"
    timer: ExchangeTimer | None = None
    name: str = ""  # The layer's name for error messages.

    def __deepcopy__(self, memo: Any) -> "ExchangeOptions":
        """Return a deep copy that shares the process groups, because process groups cannot be copied."""
        return replace(self, timer=deepcopy(self.timer, memo))

    @property
    def operation(self) -> str:
        """The name of this row exchange in error messages."""
        return f"the exchange of rows of {self.name}" if self.name else "the exchange of rows"

    @property
    def hops(self) -> Grid | None:
        """The node grid for a hierarchical all-to-all, or None for other all-to-all algorithms."""
        return self.grid if self.strategy.algorithm == "2dh" else None


@dataclass(frozen=True)
class Chunk:
    """A chunk of the rows that is exchanged separately, with its row counts on device and host."""

    all_to_all: AllToAll
    device: Counts
    host: Counts

    def regrouping(self) -> tuple[Groups, Tensor, Tensor]:
        """Return the row counts, an index map that sorts received rows by expert, and the inverse map."""
        per_expert = self.host.arriving_PE.sum(0).tolist()
        to_expert, to_source = regroup_maps(self.device.arriving_PE, sum(per_expert))
        return Groups(self.device.arriving_PE.sum(0), per_expert), to_expert, to_source


def exchange_rows(
    rows_RD: Tensor,
    counts_E: Tensor,
    options: ExchangeOptions,
    expert_fn: ExpertFn,
    call_id: CallId,
) -> Tensor:
    """Dispatch rows to the ranks of their experts, run `expert_fn`, and send the outputs back. Collective.

    The rows [R, D] are sorted by expert. With `options.padded`, each expert has C rows. Otherwise, unused
    rows may follow the last expert's rows; the result omits them. `counts_E` int64 has the number of used
    rows per expert. Without padding, ranks first exchange row counts and compare call IDs.
    """
    capacity = len(rows_RD) // len(counts_E)
    if options.padded:
        counts_E = torch.full_like(counts_E, capacity)
    device, host = _counts(counts_E, capacity, options, call_id)
    number, degree = options.strategy.overlap, options.strategy.adaptive_r
    num_rows = int(host.leaving_PE.sum()) // degree
    rows_RD = rows_RD[:num_rows]
    repeats = repeat_blocks(counts_E, num_rows, degree) if degree > 1 else None
    if repeats is not None:
        rows_RD = gather(rows_RD, *repeats)
    parts = [(device.chunk(i, number), host.chunk(i, number)) for i in range(number)]
    chunks = [Chunk(_all_to_all(*part, options), *part) for part in parts]
    if number == 1:
        (chunk,) = chunks
        received_RD = chunk.all_to_all.dispatch(rows_RD)
        out_RD = expert_fn(received_RD, *chunk.regrouping())
        rows_RD = chunk.all_to_all.combine(out_RD)
    else:  # The exchange runs in parallel to the experts.
        blocks_BC = torch.stack([chunk.device.leaving_PE.reshape(-1) for chunk in chunks], 1)
        to_chunk, to_block = regroup_maps(blocks_BC, len(rows_RD))
        sizes = [int(chunk.host.leaving_PE.sum()) for chunk in chunks]
        pieces = zip(chunks, permute(rows_RD, to_chunk, to_block).split(sizes), strict=True)
        leaving = [chunk.all_to_all.start(rows, combine=False) for chunk, rows in pieces]
        returning = []
        for chunk, started in zip(chunks, leaving, strict=True):
            received_RD = started.finish()
            out_RD = expert_fn(received_RD, *chunk.regrouping())
            returning.append(chunk.all_to_all.start(out_RD, combine=True))
        rows_RD = torch.cat([started.finish() for started in returning])
        rows_RD = permute(rows_RD, to_block, to_chunk)
    return rows_RD if repeats is None else sum_copies(rows_RD, *repeats)


def agreed_capacity(counts_E: Tensor, options: ExchangeOptions, call_id: CallId) -> int:
    """Return the largest row count of any expert on any rank, but at least 1. Collective.

    In a forward pass with padding, only this function synchronizes with the host.
    """
    need_P1 = counts_E.max().clamp_min(1).expand(dist.get_world_size(options.group), 1)
    _, host = exchange_counts(need_P1, options.group, options.operation, call_id, options.hops)
    return int(host.arriving_PE.max())


def _counts(
    counts_E: Tensor, capacity: int, options: ExchangeOptions, call_id: CallId
) -> tuple[Counts, Counts]:
    """Return an exchange's row counts on device and host. Collective, unless rows are padded."""
    group, paths = options.group, (options.hops, bool(options.strategy.plan))
    leaving_PE = _leaving(counts_E, options)
    if not options.padded:
        return exchange_counts(leaving_PE, group, options.operation, call_id, *paths)
    # With padding, all counts are known: creating them on the host is cheaper than copying them there.
    host_PE = _leaving(torch.full(counts_E.shape, capacity), options)
    rank = dist.get_rank(group)
    return even_counts(leaving_PE, rank, *paths), even_counts(host_PE, rank, *paths)


def _leaving(counts_E: Tensor, options: ExchangeOptions) -> Tensor:
    counts = destinations(counts_E, options.slices, options.strategy.adaptive_r)
    return counts.view(dist.get_world_size(options.group), -1)


def _all_to_all(device: Counts, host: Counts, options: ExchangeOptions) -> AllToAll:
    strategy, operation = options.strategy, options.operation
    if strategy.plan:
        forth, back = planned(host, options.group, strategy.plan, operation)
    elif options.hops is not None:
        forth, back = hierarchical(device, host, options.hops, operation)
    else:
        forth, back = linear(host, options.group, operation)
    return AllToAll(forth=forth, back=back, transfer_dtype=options.transfer_dtype, timer=options.timer)
