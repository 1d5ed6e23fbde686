"""Process groups for expert parallelism (EP), and the experts that each rank holds.

W is world_size, P is expert_parallel_size, E is the number of experts, and e is the number of local
experts. Each P consecutive ranks form an EP group and exchange tokens. Ranks that are equal modulo P are EP
replicas and hold the same experts. If P exceeds a layer's E, s = P / E consecutive ranks each hold one
shard (part of the hidden dimension) of an expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.agreement import agree
from fairseq_tutel.parallel.guard import guarded, name_ranks, timeout_of_groups


@dataclass(frozen=True)
class Slice:
    """Describes how an expert tensor [e, ...] is split into `count` equal parts along dimension `dim`."""

    count: int = 1
    dim: int = 0


@dataclass(frozen=True)
class Part:
    """The experts of a layer that a rank holds: `num_local` experts, whose global IDs start at `first`.

    If an expert's hidden dimension is split over s = `slices` ranks, this rank holds shard `index`.
    """

    num_local: int
    first: int = 0
    slices: int = 1
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of an EP group on N nodes of L ranks: rank n * L + l has local index l on node n.

    node_group has the ranks of this node. rail_group has all ranks with this rank's local index.
    """

    nodes: int
    local: int
    node_group: dist.ProcessGroup
    rail_group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The process groups that a rank uses for expert parallelism. A group with only this rank is None.

    `make_topology` creates a topology. `ft.Topology()` is a topology of one rank with all experts.

    Attributes:
        world_size: the number of ranks, W.
        rank: this rank, from 0 to W - 1.
        group: the W ranks; None for all ranks of the job.
        expert_parallel_size: the number of ranks of an EP group, P.
        expert_group: the P ranks of the EP group.
        replica_group: the W / P ranks that hold the same experts.
        grid: the nodes of the EP group, or None without a grid (see `make_topology`).
        share_groups: maps each number of ranks to the group of this size that gathers expert shards.

    Example:
        >>> ft.Topology().local_experts(8)
        range(0, 8)
    """

    world_size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    expert_parallel_size: int = 1
    expert_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    grid: Grid | None = None
    share_groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> "Topology":
        """Return this object, because process groups cannot be copied. Copied layers share groups."""
        return self

    @property
    def num_replicas(self) -> int:
        """W / P, the number of ranks that hold the same experts."""
        return self.world_size // self.expert_parallel_size

    def part(self, num_experts: int) -> Part:
        """Return which experts of a layer, or which shard of an expert, this rank holds."""
        size = self.expert_parallel_size
        if num_experts % size and size % num_experts:
            raise ValueError(
                f"num_experts (--moe-expert-count) is {num_experts}, but the layer's topology was created "
                f"for expert parallelism over {size} ranks; create it with make_topology([{num_experts}]), "
                "or with the numbers of experts of all layers."
            )
        count = max(1, num_experts // self.expert_parallel_size)
        slices = self.slices(num_experts)
        which, index = divmod(self.rank % size, slices)
        return Part(count, which * count, slices, index)

    def local_experts(self, num_experts: int) -> range:
        """Return the global IDs of the experts that this rank holds."""
        part = self.part(num_experts)
        return range(part.first, part.first + part.num_local)

    def share_group(self, slices: int, degree: int) -> dist.ProcessGroup | None:
        """Return the group of ranks that gather an expert's shards, or None for a single rank.

        The group has s / r ranks, where s is `slices` and r is `degree`.
        """
        joined = slices // degree
        return self.share_groups[joined] if joined > 1 else None

    def slices(self, num_experts: int) -> int:
        """Return s, the number of ranks over which one expert is sharded."""
        return max(1, self.expert_parallel_size // num_experts)


def expert_parallel_size(world_size: int, expert_counts: Sequence[int], requested: int = 0) -> int:
    """Return P, the number of ranks in an EP group.

    If `requested` is 0, P is the greatest common divisor of the numbers of ranks and experts.
    """
    if requested == 0:
        return math.gcd(world_size, *expert_counts)

    def fits_all(size: int) -> bool:
        return world_size % size == 0 and not any(n % size and size % n for n in expert_counts)

    if requested < 0 or not fits_all(requested):
        counts = ", ".join(map(str, sorted(set(expert_counts))))
        sizes = [size for size in range(1, world_size + 1) if fits_all(size)]
        raise ValueError(
            f"--moe-expert-parallel-size is {requested}, which does not fit the number of ranks "
            f"({world_size}) and the number of experts ({counts}); give {' or '.join(map(str, sizes))}, or "
            "0 for the greatest common divisor; or start a different number of ranks with torchrun."
        )
    return requested


def share_sizes(size: int, expert_counts: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the rank groups that all-gather an expert's shards, without groups of one rank.

    Groups of s / r ranks gather an expert with s shards, for every divisor r of s.
    """
    shards = {size // n for n in expert_counts if size > n}
    return tuple(n for n in range(2, size + 1) if any(s % n == 0 for s in shards))


# All layers and models share process groups, because every rank must join the creation of a group. Each key
# is the group of a topology's W ranks, and the topology is kept as long as this group exists.
_topologies: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], Topology]] = WeakKeyDictionary()


def make_topology(expert_counts: Sequence[int], requested: int = 0, ranks_per_node: int = 0) -> Topology:
    """Create or reuse this rank's process groups for layers with the given expert counts. Collective.

    Every rank must give the same arguments.

    Args:
        expert_counts: the number of experts of every layer.
        requested: P, or 0 for the greatest common divisor of the numbers of ranks and experts.
        ranks_per_node: the number of ranks per node, or 0 for no grid. A grid needs 1 < ranks_per_node < P.

    Raises:
        ValueError: P does not fit the numbers of ranks and experts, or ranks gave different arguments.

    Example:
        >>> topology = ft.make_topology([8])  # after torch.distributed.init_process_group, if there is one
        >>> config = ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8)
        >>> layer = ft.MoELayer(config, topology, seed=1)
    """
    count, whole = world.size(), dist.group.WORLD
    if whole is not None and count > 1:
        # Ranks that created different process groups would wait for each other forever.
        agree(
            {
                "--moe-expert-parallel-size": requested,
                "the number of experts of each layer": list(expert_counts),
                "the number of ranks of a node": ranks_per_node,
            }
        )
    size = expert_parallel_size(count, expert_counts, requested)
    if whole is None:
        return Topology()
    return _made(None, size, ranks_per_node, share_sizes(size, expert_counts))


def topology_within(group: dist.ProcessGroup, num_experts: int, sliced: bool = False) -> Topology:
    """Create or reuse process groups for expert parallelism within `group`. Collective over `group`.

    If `sliced`, all ranks of the group hold shards of experts, because there are fewer experts than ranks.
    Without `sliced`, P is the greatest common divisor of the numbers of ranks and experts.
    """
    count = dist.get_world_size(group)
    size = count if sliced else math.gcd(count, num_experts)
    return _made(group, size, 0, share_sizes(size, [num_experts]))


def _made(group: dist.ProcessGroup | None, size: int, local: int, shares: tuple[int, ...]) -> Topology:
    whole = group or dist.group.WORLD
    assert whole is not None
    made = _topologies.setdefault(whole, {})
    key = (size, local, shares)
    if key not in made:
        made[key] = _create(group, *key)
    return made[key]


def _create(group: dist.ProcessGroup | None, size: int, local: int, shares: tuple[int, ...]) -> Topology:
    count = dist.get_world_size(group)

    def strided(number: int, step: int = 1) -> dist.ProcessGroup:
        """Create groups of ranks at distance `step` in each block of `number` consecutive ranks."""
        parts = range(0, count, number)
        return _new(group, [range(part + i, part + number, step) for part in parts for i in range(step)])

    # Even if P = W, EP has its own communicator, so ranks may run EP and other collectives in any order.
    expert_group = strided(size) if size > 1 else None
    replica_group = strided(count, size) if 1 < size < count else None
    grid = None
    if 1 < local < size and size % local == 0:
        groups = {"node_group": strided(local), "rail_group": strided(size, local)}
        grid = Grid(nodes=size // local, local=local, **groups)
    return Topology(
        world_size=count,
        rank=dist.get_rank(group),
        group=group,
        expert_parallel_size=size,
        expert_group=expert_group,
        replica_group=replica_group,
        grid=grid,
        share_groups={
            number: expert_group if number == size and expert_group is not None else strided(number)
            for number in shares
        },
    )


def _new(callers: dist.ProcessGroup | None, groups: Sequence[range]) -> dist.ProcessGroup:
    """Create the given groups of ranks, and return this rank's group.

    If `callers` is None, all ranks of the job must create all groups. Within a smaller group `callers`,
    each rank creates only the group to which it belongs, because ranks outside `callers` do not join.
    """
    rank = dist.get_rank(callers)
    own = next(ranks for ranks in groups if rank in ranks)
    if callers is None:
        with guarded("the creation of process groups"):
            return {ranks: dist.new_group(ranks, timeout=timeout_of_groups()) for ranks in groups}[own]
    if len(own) == dist.get_world_size(callers):
        return callers
    everywhere = [dist.get_global_rank(callers, each) for each in own]
    backend, timeout = dist.get_backend(callers), timeout_of_groups()
    with guarded(f"the creation of the group of {name_ranks(everywhere)}", callers):
        return dist.new_group(everywhere, timeout, backend, use_local_synchronization=True)


def group_of_threads() -> dist.ProcessGroup:
    """Create a group of all ranks with a time-out of a day, for communication by threads. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def mark_slice(parameter: nn.Parameter, slicing: Slice) -> None:
    """Store a parameter's sharding in an attribute, which fairseq's fp32 copy also gets."""
    # fairseq copies only the attribute `param_group`. fairseq's composite optimizer also uses this
    # attribute, but experts do not support that optimizer.
    parameter.param_group = slicing  # type: ignore[attr-defined]


def slice_of(parameter: Tensor) -> Slice:
    """Return a parameter's sharding that `mark_slice` stored. The default is no sharding."""
    slicing = getattr(parameter, "param_group", None)
    return slicing if isinstance(slicing, Slice) else Slice()


def join(parts: Sequence[Tensor], slicing: Slice) -> Tensor:
    """Concatenate tensors of consecutive ranks. First join the shards of each expert, then the experts."""
    n = slicing.count
    if n > 1:
        parts = [torch.cat(list(parts[i : i + n]), slicing.dim) for i in range(0, len(parts), n)]
    return torch.cat(list(parts))


def cut(whole: Tensor, slicing: Slice, index: int) -> Tensor:
    """Return shard `index` of a complete expert tensor, as a view."""
    width = whole.shape[slicing.dim] // slicing.count
    return whole.narrow(slicing.dim, index * width, width)
