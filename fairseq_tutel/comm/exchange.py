"""Exchange: send rows to the ranks that own their experts, run the experts, and send the outputs back.

R rows, D model_dim, E experts (e local), P ranks of the expert group, C capacity. `expert_fn(rows, groups)`
is a callable, so this file depends on no expert class.

Rows may be sent in chunks, in parallel to the experts' computation. The forward of three chunks
(d: dispatch, x: experts, c: combine):

    exchange  d0 d1 d2 c0 c1 c2
    experts      x0 x1 x2

The backward is the reverse, since autograd runs the last node first: all gradients of the combine are under
way before the first expert needs one. Source: Tutel (Hwang et al. 2023), section 3.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.comm.all_to_all import (
    AllToAll,
    HierarchicalAllToAll,
    LinearAllToAll,
    PlannedAllToAll,
)
from fairseq_tutel.comm.call_id import NO_CALL_ID, CallId, compare
from fairseq_tutel.comm.collectives import all_to_all
from fairseq_tutel.comm.counts import (
    Counts,
    exchange_all_counts,
    exchange_counts,
    exchange_counts_in_two_hops,
)
from fairseq_tutel.comm.regroup import (
    destinations,
    gather,
    permute,
    regroup_maps,
    repeat_blocks,
    sum_copies,
)
from fairseq_tutel.comm.transfer import ExchangeTimer
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.ranks.groups import Grid

ExpertFn = Callable[[Tensor, Groups], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How a layer exchanges rows.

    Attributes:
        group: ranks that exchange rows.
        grid: the nodes of the group, which 2dh needs.
        strategy: adaptive_r (at least 1), overlap and algorithm.
        slices: s, ranks of one expert.
        padded: every expert has the same number of rows on every rank.
        transfer_dtype: see `transfer.pack`.
        backend: of the kernels that regroup rows; see `kernels.backend_for`.
        timer: measures the row exchanges.
        name: of the layer, for errors.
    """

    group: dist.ProcessGroup
    grid: Grid | None = None
    strategy: Strategy = field(default_factory=Strategy)
    slices: int = 1
    padded: bool = False
    transfer_dtype: str = "same"
    backend: str = "auto"
    timer: ExchangeTimer | None = None
    name: str = ""

    @property
    def operation(self) -> str:
        """The exchange's name in error messages."""
        return f"{AllToAll.name} of {self.name}" if self.name else AllToAll.name

    @property
    def hops(self) -> Grid | None:
        """The grid of a hierarchical all-to-all; None for others."""
        return self.grid if self.strategy.algorithm == "2dh" else None


@dataclass(frozen=True)
class Chunk:
    """A part of the rows that is exchanged by itself.

    Attributes:
        all_to_all: sends the rows and returns them.
        arriving_PE: [P, e] int64, received rows on the device.
        host_arriving_PE: the same on the host.
        num_leaving: rows that this rank sends.
    """

    all_to_all: AllToAll
    arriving_PE: Tensor
    host_arriving_PE: Tensor
    num_leaving: int

    def regrouping(self) -> tuple[Tensor, Tensor, Groups]:
        """Return the maps of received rows to expert-major order and back, and the experts' groups."""
        per_expert = self.host_arriving_PE.sum(0).tolist()
        maps = regroup_maps(self.arriving_PE, sum(per_expert))
        return *maps, Groups(self.arriving_PE.sum(0), per_expert)


@dataclass(frozen=True, kw_only=True)
class PreparedExchange:
    """An exchange whose row counts all ranks have agreed on; see `prepare`.

    Attributes:
        chunks: in the order in which they are sent.
        counts_E: [E] int64, rows of each expert on this rank.
        num_rows: their sum.
        degree: r, ranks that receive a row.
        chunk_blocks: [blocks, chunks] int64, rows of every block in every chunk; None for one chunk.
    """

    chunks: Sequence[Chunk]
    counts_E: Tensor
    num_rows: int
    degree: int = 1
    chunk_blocks: Tensor | None = None

    def run(self, rows_RD: Tensor, expert_fn: ExpertFn) -> Tensor:
        """Dispatch rows, apply `expert_fn` to expert-major rows, and combine.

        Args:
            rows_RD: [R, D] expert-major rows: compact, or E * C padded ones.
            expert_fn: maps rows of the local experts, expert-major.

        Returns:
            [R', D] in the order of the input; compact rows without their unused tail.
        """
        chunks, rows_RD = self.chunks, rows_RD[: self.num_rows]
        repeats = None
        if self.degree > 1:
            repeats = repeat_blocks(self.counts_E, self.num_rows, self.degree)
            rows_RD = gather(rows_RD, *repeats)
        if self.chunk_blocks is None:
            (chunk,) = chunks
            received_RD = chunk.all_to_all.dispatch(rows_RD)
            to_expert, to_source, groups = chunk.regrouping()
            out_RD = expert_fn(permute(received_RD, to_expert, to_source), groups)
            rows_RD = chunk.all_to_all.combine(permute(out_RD, to_source, to_expert))
        else:
            to_chunk, to_block = regroup_maps(self.chunk_blocks, rows_RD.shape[0])
            parts = permute(rows_RD, to_chunk, to_block).split([c.num_leaving for c in chunks])
            leaving = [
                chunk.all_to_all.start(part, combine=False)
                for chunk, part in zip(chunks, parts, strict=True)
            ]
            returning = []
            for chunk, started in zip(chunks, leaving, strict=True):
                received_RD = started.finish()
                to_expert, to_source, groups = chunk.regrouping()
                out_RD = expert_fn(permute(received_RD, to_expert, to_source), groups)
                out_RD = permute(out_RD, to_source, to_expert)
                returning.append(chunk.all_to_all.start(out_RD, combine=True))
            rows_RD = torch.cat([started.finish() for started in returning])
            rows_RD = permute(rows_RD, to_block, to_chunk)
        return rows_RD if repeats is None else sum_copies(rows_RD, *repeats)


def prepare(
    num_rows: int, counts_E: Tensor, options: ExchangeOptions, call_id: CallId = NO_CALL_ID
) -> PreparedExchange:
    """Exchange the row counts and return the exchange of the rows. Collective unless padded.

    Args:
        num_rows: R of the rows to send, with their unused tail.
        counts_E: [E] int64, kept rows of each expert.
        options: see `ExchangeOptions`.
        call_id: sent with the counts and compared.
    """
    capacity = num_rows // counts_E.shape[0]
    if options.padded:
        counts_E = torch.full_like(counts_E, capacity)
    device, host = _counts(counts_E, capacity, options, call_id)
    number, degree = options.strategy.overlap, options.strategy.adaptive_r
    hosts = [host.chunk(i, number) for i in range(number)]
    devices = hosts if device is host else [device.chunk(i, number) for i in range(number)]
    chunks = [
        Chunk(
            _all_to_all(on_device, on_host, options),
            on_device.arriving_PE,
            on_host.arriving_PE,
            int(on_host.leaving_PE.sum()),
        )
        for on_device, on_host in zip(devices, hosts, strict=True)
    ]
    blocks = [counts.leaving_PE.reshape(-1) for counts in devices]
    return PreparedExchange(
        chunks=chunks,
        counts_E=counts_E,
        num_rows=int(host.leaving_PE.sum()) // degree,
        degree=degree,
        chunk_blocks=torch.stack(blocks, 1) if number > 1 else None,
    )


def agreed_capacity(counts_E: Tensor, options: ExchangeOptions, call_id: CallId = NO_CALL_ID) -> int:
    """Return the capacity that suffices on every rank: the largest count, at least 1. Collective.

    One small exchange, and the only host read of a padded forward. A capacity factor would give a bound for
    this rank's tokens alone; other ranks may have more.
    """
    need_P1 = counts_E.max().clamp_min(1).expand(dist.get_world_size(options.group), 1)
    own_PX = call_id.prepended_to(need_P1)
    received_PX = all_to_all(own_PX, "the agreement on the size of buffers", options.group).cpu()
    compare(received_PX[:, 0], options.operation, options.group)
    return int(received_PX[:, 1].max())


def _counts(
    counts_E: Tensor, capacity: int, options: ExchangeOptions, call_id: CallId
) -> tuple[Counts, Counts]:
    """Return the counts of all blocks on the device and on the host; collective unless padded."""
    if options.padded:
        # All ranks have the same counts. Built on both sides, which is cheaper than a copy.
        host = _even_counts(torch.full(counts_E.shape, capacity), options)
        return (_even_counts(counts_E, options) if counts_E.is_cuda else host), host
    leaving_PE = _leaving(counts_E, options)
    if options.strategy.plan:
        device = exchange_all_counts(leaving_PE, options.group, call_id)
    elif options.hops is None:
        device = exchange_counts(leaving_PE, options.group, call_id)
    else:
        device = exchange_counts_in_two_hops(leaving_PE, options.hops, call_id)
    host = device.to_host()
    assert host.call_ids_P is not None
    compare(host.call_ids_P, options.operation, options.group)
    return device, host


def _leaving(counts_E: Tensor, options: ExchangeOptions) -> Tensor:
    counts = destinations(counts_E, options.slices, options.strategy.adaptive_r)
    return counts.view(dist.get_world_size(options.group), -1)


def _even_counts(counts_E: Tensor, options: ExchangeOptions) -> Counts:
    """Return the counts if every rank sends the same: this rank receives what it sends itself."""
    leaving_PE = _leaving(counts_E, options)
    rank = dist.get_rank(options.group)
    arriving_PE = leaving_PE[rank].expand_as(leaving_PE)
    if options.strategy.plan:
        crossing_PPE = leaving_PE.expand(len(leaving_PE), -1, -1)
        return Counts(leaving_PE, arriving_PE, crossing_PPE=crossing_PPE)
    if options.hops is None:
        return Counts(leaving_PE, arriving_PE)
    nodes, local = options.hops.nodes, options.hops.local
    for_my_rail = leaving_PE.view(nodes, local, -1)[:, rank % local]
    return Counts(leaving_PE, arriving_PE, for_my_rail.expand(local, -1, -1))


def _all_to_all(device: Counts, host: Counts, options: ExchangeOptions) -> AllToAll:
    fields = {
        "transfer_dtype": options.transfer_dtype,
        "timer": options.timer,
        "name": options.operation,
    }
    if options.strategy.plan:
        return PlannedAllToAll.of(host, options.group, options.strategy.plan, **fields)
    if options.hops is None:
        return LinearAllToAll.of(host, options.group, **fields)
    return HierarchicalAllToAll.of(device, host, options.hops, options.backend, **fields)
