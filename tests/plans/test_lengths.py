"""Chunks of different lengths cannot be added, or written to the same position of `out`."""

import pytest

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors.layout import walk
from fairseq_tutel.plans.format import PlanError, Writer


def gather_parked():
    """Return an all_gather plan in which each rank writes a short chunk to the place of a long chunk."""
    w = Writer(2)
    for rank in range(2):
        other = 1 - rank
        w.copy(rank, ("in", 1), ("out", 2 * rank))
        w.copy(rank, ("out", 2 * rank), ("out", 2 * rank + 1))
        w.copy(rank, ("in", 0), ("out", 2 * rank))
        w.send(rank, other, ("in", 0), ("tmp", 0), 2)
        w.wait(rank, other)
        w.copy(rank, ("tmp", 0), ("out", 2 * other), 2)
        w.flush(rank, other)
    return w.plan("gather", "all_gather", 2, temporary=2)


def sum_of_blocks():
    """Return an all_to_all plan that also adds blocks of two sources in `tmp` and never reads the sum."""
    w = Writer(2)
    for rank in range(2):
        other = 1 - rank
        w.send(rank, other, ("in", other), ("tmp", 0))
        w.wait(rank, other)
        w.copy(rank, ("tmp", 0), ("out", other))
        w.copy(rank, ("in", rank), ("out", rank))
        w.reduce(rank, [("in", rank), ("tmp", 0)], ("tmp", 1))
        w.flush(rank, other)
    return w.plan("blocks", "all_to_all", 1, temporary=2)


@pytest.mark.parametrize(
    "plan, what",
    [
        (gather_parked(), r"step 0 \(copy\) writes a chunk of a different length to out\[0\] of rank 0"),
        (sum_of_blocks(), r"step 5 \(reduce\) adds chunks of different lengths"),
    ],
)
def test_the_checker_and_the_executors_reject_chunks_of_wrong_lengths(plan, what):
    for refuse in (check, walk):
        with pytest.raises(PlanError, match=what):
            refuse(plan)
