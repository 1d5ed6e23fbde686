"""The logged times of all-to-alls are averages over micro-batches."""

import pytest
from fairseq.logging import metrics

from fairseq_tutel.plugin.criterions.expert_log import reduce_expert_log


@pytest.mark.parametrize(
    "batches, expected", [((1, 2), 3.0), ((0, 0), 9.0)], ids=["three batches", "none used"]
)
def test_times_of_all_to_alls_are_averages_over_micro_batches(batches, expected):
    name = "all_to_all_cpu_time_ms"
    logs = [{"moe_micro_batches": n, name: ms} for n, ms in zip(batches, (6.0, 3.0), strict=True)]
    with metrics.aggregate(new_root=True) as found:
        reduce_expert_log(logs)
    assert found.get_smoothed_values() == {name: expected}
