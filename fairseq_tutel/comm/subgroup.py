"""Topology within a process group of the user's: experts are exchanged there, and nowhere else.

W ranks of the group, P expert_parallel_size, both as in comm.topology, with ranks counted in the group.
"""

import math
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fairseq_tutel.comm.topology import Topology

# A group of a group lives as long as the one it was made from; all layers share it.
_parts: WeakKeyDictionary[dist.ProcessGroup, dict[int, Topology]] = WeakKeyDictionary()


def topology_within(group: dist.ProcessGroup, num_experts: int) -> Topology:
    """Return this rank's topology in a group, P being the greatest common divisor of W and the experts.

    Collective over the group alone, the first time that P is neither 1 nor W: groups of P ranks, and of
    their replicas, are made then.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    size = math.gcd(world, num_experts)
    if size in (1, world):
        return Topology(
            world_size=world,
            rank=rank,
            expert_parallel_size=size,
            expert_group=group if size > 1 else None,
        )
    made = _parts.setdefault(group, {})
    if size not in made:
        made[size] = _split(group, world, rank, size)
    return made[size]


def _split(group: dist.ProcessGroup, world: int, rank: int, size: int) -> Topology:
    first = rank - rank % size
    return Topology(
        world_size=world,
        rank=rank,
        expert_parallel_size=size,
        expert_group=_new_group(group, range(first, first + size)),
        replica_group=_new_group(group, range(rank % size, world, size)),
    )


def _new_group(group: dist.ProcessGroup, ranks: range) -> dist.ProcessGroup:
    # Local synchronization: the ranks outside know nothing of this layer and join in no call.
    everywhere = [dist.get_global_rank(group, rank) for rank in ranks]
    backend = dist.get_backend(group)
    return dist.new_group(everywhere, backend=backend, use_local_synchronization=True)
