"""The harness itself: answers by rank, errors with their traceback, recovery."""

import pytest
import torch
import torch.distributed as dist


def rank_and_sum(start: int) -> tuple[int, int]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the second rank's trouble")
    dist.barrier()


def test_answers_come_by_rank(ranks):
    assert ranks(2).run(rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_an_error_is_raised_with_its_traceback_and_the_next_run_works(ranks):
    with pytest.raises(AssertionError, match=r"fail_on_rank_1[\s\S]*the second rank's trouble"):
        ranks(2).run(fail_on_rank_1)
    assert ranks(2).run(rank_and_sum, 0) == [(0, 1), (1, 1)]
