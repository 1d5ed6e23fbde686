"""Exchange: rows cross to the ranks that own their experts, the experts run, and the rows come back.

R rows, D model_dim, E experts (e local), P ranks of the expert group, C capacity. `expert_fn(rows,
groups)` is a callable, so this file knows no experts.

Rows may go in chunks, which travel while the experts work on others. On the timeline of a forward with
d = 3 (t: there, x: experts, b: back):

    exchange  t0 t1 t2 b0 b1 b2
    experts      x0 x1 x2

The backward is the same in reverse, since autograd runs what came last first: all the gradients of the
way back are under way before the first expert needs one. Source: Tutel (Hwang et al. 2023), section 3.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.comm.all_to_all import (
    HierarchicalTrip,
    LinearTrip,
    PlanTrip,
    exchange_all_counts,
    exchange_counts,
    exchange_counts_in_two_hops,
)
from fairseq_tutel.comm.collectives import all_to_all
from fairseq_tutel.comm.regroup import destinations, permute, regroup_maps, repeat_blocks
from fairseq_tutel.comm.call_id import NO_STAMP, Stamp, compare
from fairseq_tutel.comm.transfer import Counts, ExchangeTimer, Trip
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.ranks.groups import Grid

ExpertFn = Callable[[Tensor, Groups], Tensor]
# Maps the rows that arrived in chunk i to as many rows that go back.
Stage = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How rows travel.

    Attributes:
        group: ranks that exchange them; None: they stay.
        grid: the nodes of the group, which 2dh needs.
        strategy: adaptive_r (at least 1 within a group), overlap and algorithm.
        slices: s, ranks of one expert.
        padded: every expert's rows are as many on every rank.
        wire: see `trip.pack`.
        backend: of the kernels that regroup; see `kernels.backend_for`.
        timer: of the rows.
        name: of the layer, for errors.
        stamp: of this call, which ranks compare.
    """

    group: dist.ProcessGroup | None = None
    grid: Grid | None = None
    strategy: Strategy = field(default_factory=Strategy)
    slices: int = 1
    padded: bool = False
    wire: str = "same"
    backend: str = "auto"
    timer: ExchangeTimer | None = None
    name: str = ""
    stamp: Stamp = NO_STAMP

    @property
    def operation(self) -> str:
        """What an error calls the exchange."""
        return f"{Trip.name} of {self.name}" if self.name else Trip.name

    @property
    def hops(self) -> Grid | None:
        """The grid over which rows go in two hops, if they do."""
        return self.grid if self.strategy.algorithm == "2dh" else None


def run(rows_RD: Tensor, counts_E: Tensor, expert_fn: ExpertFn, options: ExchangeOptions) -> Tensor:
    """Send, regroup by expert, apply `expert_fn`, regroup back, return.

    Args:
        rows_RD: [R, D] expert-major rows: compact, or E * C for padded ones.
        counts_E: [E] int64, kept rows of each expert.
        expert_fn: maps rows of the local experts, expert-major.
        options: see ExchangeOptions.

    Returns:
        [R', D] in the order of the input; compact rows without their unused tail.
    """
    if options.group is None:
        return expert_fn(rows_RD, Groups.of_tensor(counts_E))
    capacity = rows_RD.shape[0] // counts_E.shape[0]
    if options.padded:
        counts_E = torch.full_like(counts_E, capacity)
    degree = options.strategy.adaptive_r
    device, host = _counts(counts_E, capacity, options)
    num_rows = int(host.leaving_PE.sum()) // degree
    rows_RD = rows_RD[:num_rows]
    if degree == 1:
        return _in_chunks(rows_RD, device, host, expert_fn, options)
    repeated = repeat_blocks(rows_RD, counts_E, num_rows, degree)
    return repeated.summed(_in_chunks(repeated.rows_RD, device, host, expert_fn, options))


def agreed_capacity(counts_E: Tensor, options: ExchangeOptions) -> int:
    """Return the places per expert that suffice on every rank: the largest count, at least 1.

    One small exchange, and the one host read of a padded forward. A capacity factor would bound this
    rank's need by its own tokens; how many the others have, only they know.
    """
    assert options.group is not None
    need_P1 = counts_E.max().clamp_min(1).expand(dist.get_world_size(options.group), 1)
    own_PX = options.stamp.beside(need_P1)
    came_PX = all_to_all(own_PX, "the agreement on the size of buffers", options.group).cpu()
    compare(came_PX[:, 0], options.operation, options.group)
    return int(came_PX[:, 1].max())


def _counts(counts_E: Tensor, capacity: int, options: ExchangeOptions) -> tuple[Counts, Counts]:
    """Return the counts of all blocks on the device and on the host; collective unless padded."""
    assert options.group is not None
    if options.padded:
        # The same on every rank, so nobody need be told; made in both places rather than copied.
        host = _even_counts(torch.full(counts_E.shape, capacity), options)
        return (_even_counts(counts_E, options) if counts_E.is_cuda else host), host
    leaving_PE = _leaving(counts_E, options)
    if options.strategy.plan:
        device = exchange_all_counts(leaving_PE, options.group, options.stamp)
    elif options.hops is None:
        device = exchange_counts(leaving_PE, options.group, options.stamp)
    else:
        device = exchange_counts_in_two_hops(leaving_PE, options.hops, options.stamp)
    host = device.to_host()
    assert host.stamps_P is not None
    compare(host.stamps_P, options.operation, options.group)
    return device, host


def _leaving(counts_E: Tensor, options: ExchangeOptions) -> Tensor:
    counts = destinations(counts_E, options.slices, options.strategy.adaptive_r)
    return counts.view(dist.get_world_size(options.group), -1)


def _even_counts(counts_E: Tensor, options: ExchangeOptions) -> Counts:
    """Return the counts where every rank sends alike: what comes is what this rank sends itself."""
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


def _trip(device: Counts, host: Counts, options: ExchangeOptions) -> Trip:
    assert options.group is not None
    common = {"wire": options.wire, "timer": options.timer, "name": options.operation}
    if options.strategy.plan:
        return PlanTrip.of(host, options.group, options.strategy.plan, **common)
    if options.hops is None:
        return LinearTrip.of(host, options.group, **common)
    return HierarchicalTrip.of(device, host, options.hops, options.backend, **common)


def _in_chunks(
    rows_RD: Tensor, device: Counts, host: Counts, expert_fn: ExpertFn, options: ExchangeOptions
) -> Tensor:
    """Send the rows in as many chunks as asked for, each block of rows cut in that many parts."""
    number = options.strategy.overlap
    hosts = [host.chunk(i, number) for i in range(number)]
    devices = hosts if device is host else [device.chunk(i, number) for i in range(number)]
    trips = [_trip(*both, options) for both in zip(devices, hosts, strict=True)]

    def stage(i: int, received_RD: Tensor) -> Tensor:
        per_expert = hosts[i].arriving_PE.sum(0).tolist()
        to_expert, to_source = regroup_maps(devices[i].arriving_PE, sum(per_expert))
        groups = Groups(devices[i].arriving_PE.sum(0), per_expert)
        done_RD = expert_fn(permute(received_RD, to_expert, to_source), groups)
        return permute(done_RD, to_source, to_expert)

    if number == 1:
        return pipelined([rows_RD], trips, stage)
    blocks = torch.stack([counts.leaving_PE.reshape(-1) for counts in devices], 1)
    to_chunk, to_block = regroup_maps(blocks, rows_RD.shape[0])
    sizes = [int(counts.leaving_PE.sum()) for counts in hosts]
    chunks = permute(rows_RD, to_chunk, to_block).split(sizes)
    return permute(pipelined(chunks, trips, stage), to_block, to_chunk)


def pipelined(chunks: Sequence[Tensor], trips: Sequence[Trip], stage: Stage) -> Tensor:
    """Send every chunk on its trip, apply `stage` where it arrives, and return all rows in order.

    Args:
        chunks: [R_i, D] each, in the order of their destination ranks.
        trips: of each chunk.
        stage: see `Stage`.
    """
    if len(chunks) == 1:
        (chunk,), (trip,) = chunks, trips
        return trip.back(stage(0, trip.there(chunk)))
    leaving = [trip.start(chunk, False) for chunk, trip in zip(chunks, trips, strict=True)]
    returning = [
        trip.start(stage(i, started.finish()), True)
        for i, (started, trip) in enumerate(zip(leaving, trips, strict=True))
    ]
    return torch.cat([started.finish() for started in returning])
