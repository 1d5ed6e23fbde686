"""ZeRO partitions define the elements that each rank owns and the buckets in which ranks send gradients."""

import pytest
import torch
from uneven import some_parameters

from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.zero_partition import Share, own_elements, partitions_of


@pytest.mark.parametrize(("dtype", "offload"), [
    (torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.float16, True),
])  # fmt: skip
def test_offloaded_or_half_precision_parameters_have_a_separate_fp32_copy(dtype, offload):
    parameters = some_parameters(dtype)
    place = Topology(world_size=4, rank=1, expert_parallel_size=2)
    partitions, _ = partitions_of(parameters, place, offload=offload)
    for parameter, partition in zip(parameters, partitions, strict=True):
        own = own_elements(parameter.data, partition.share)
        assert partition.own.dtype == torch.float32
        assert torch.equal(partition.own.data, own.float())
        shared = partition.own.data.untyped_storage().data_ptr() == parameter.data_ptr()
        assert shared == (dtype == torch.float32 and not offload) or parameter.numel() == 0


def test_a_zero_bucket_has_parameters_of_one_kind_and_a_limited_size():
    parameters = some_parameters()
    place = Topology(world_size=4, rank=3, expert_parallel_size=2)
    partitions, buckets = partitions_of(parameters, place, bucket_bytes=100)
    in_buckets = [partition for bucket in buckets for partition in bucket.partitions]
    assert len(in_buckets) == len(partitions) == len(parameters)
    assert {id(partition) for partition in in_buckets} == {id(partition) for partition in partitions}
    assert len(buckets) > 3
    for bucket in buckets:
        assert {partition.share for partition in bucket.partitions} == {bucket.share}
        sizes = [8 * partition.parameter.numel() for partition in bucket.partitions]
        assert len(sizes) == 1 or sum(sizes[:-1]) < 100
    experts = [partition.share for partition in partitions[4:6]]
    assert experts == [Share(2, 1, None, 4)] * 2
    assert partitions[0].share == Share(4, 3, None, 4)
