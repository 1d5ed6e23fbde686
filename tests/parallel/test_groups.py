"""EP groups are ranks that exchange tokens, and EP replicas are ranks with the same experts."""

import math

import pytest
import torch.distributed as dist

from fairseq_tutel.parallel.groups import Topology, expert_parallel_size, make_topology


@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize("counts", [(4,), (6,), (8, 12), (1,), (7, 7)], ids=str)
def test_the_default_ep_size_is_the_greatest_common_divisor_of_ranks_and_experts(world_size, counts):
    size = expert_parallel_size(world_size, counts)
    dividers = [d for d in range(1, world_size + 1) if math.gcd(d, world_size, *counts) == d]
    assert size == max(dividers)


@pytest.mark.parametrize(
    "world_size, counts, requested", [(4, [6], 4), (4, [8], 3), (2, [8], 4), (4, [8, 6], 4), (4, [4], -1)]
)
def test_an_ep_size_that_does_not_fit_ranks_and_experts_raises_an_error(world_size, counts, requested):
    with pytest.raises(ValueError) as error:
        expert_parallel_size(world_size, counts, requested)
    message = str(error.value)
    assert message.startswith(f"--moe-expert-parallel-size is {requested}, which does not fit")
    assert f"ranks ({world_size})" in message
    assert all(str(count) in message for count in counts)
    assert message.endswith("or start a different number of ranks with torchrun.")


def describe(counts: list[int], requested: int) -> dict[str, object]:
    made = make_topology(counts, requested)

    def members(group) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    assert make_topology(counts, requested) is made  # Process groups are created only once.
    return {
        "size": made.expert_parallel_size,
        "replicas": made.num_replicas,
        "expert_group": members(made.expert_group),
        "replica_group": members(made.replica_group),
    }


@pytest.mark.parametrize("counts, requested", [([8], 2), ([6], 0), ([4, 2], 0)])
def test_consecutive_ranks_form_ep_groups_and_replicas_have_equal_positions(ranks, counts, requested):
    for rank, got in enumerate(ranks(4).run(describe, counts, requested)):
        assert got == {
            "size": 2,
            "replicas": 2,
            "expert_group": [[0, 1], [2, 3]][rank // 2],
            "replica_group": [[0, 2], [1, 3]][rank % 2],
        }


def test_without_torch_distributed_the_topology_has_one_rank():
    made = make_topology([4])
    assert made == Topology()
    assert list(made.local_experts(4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"number of ranks \(1\)"):
        make_topology([4], 2)
