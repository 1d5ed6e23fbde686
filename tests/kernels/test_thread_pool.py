"""Experts run in parallel on the threads of torch's thread pool."""

import dataclasses
from threading import Barrier

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels import thread_pool

MUCH = thread_pool.LEAST_WORK  # This number of multiplications per row is enough to use threads.


@pytest.fixture
def two_threads():
    if thread_pool._region() is None:
        pytest.skip("torch has no OpenMP here")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("threads", "counts", "row_work", "together", "apart"),
    [
        (1, (4, 4), MUCH, [0, 1], []),
        (2, (3, 0, 4, 5), MUCH, [], [3, 2, 0, 1]),
        (2, (3, 4, 5, 0), MUCH // 100, [0, 1, 2, 3], []),  # The experts have too little work for threads.
        # Reading the weights is enough work for threads.
        (2, (0, 1, 0, 1), MUCH // thread_pool.ROWS_OF_READING, [], [1, 3, 0, 2]),
        # If one thread computed expert 0 alone, the other thread would wait, so both compute it together.
        (2, (9, 1, 1), MUCH, [0], [1, 2]),
        # Two threads cannot divide three equal experts evenly, so both compute each expert together.
        (2, (4, 4, 4), MUCH, [0, 1, 2], []),
        (2, (7, 3), MUCH, [0, 1], []),
        (2, (7, 0), MUCH, [0, 1], []),
        (2, (0, 0), MUCH, [0, 1], []),
    ],
)
def test_some_experts_run_on_all_threads_and_others_on_one_thread_each(
    two_threads, threads, counts, row_work, together, apart
):
    torch.set_num_threads(threads)
    assert [list(part) for part in thread_pool._shares(counts, row_work)] == [together, apart]


def test_two_threads_compute_each_expert_once(two_threads):
    # A thread continues only while the other thread computes an expert too.
    both, done = Barrier(2, timeout=60), []

    def make_worker():
        assert not torch.is_grad_enabled()
        return lambda expert: (both.wait(), done.append(expert))

    thread_pool.for_each(make_worker, (4, 2, 3, 1), MUCH)
    assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_an_experts_thread_is_raised(two_threads, error):
    def worker(expert):
        if expert == 2:
            raise error("of one expert")

    with pytest.raises(error, match="of one expert"):
        thread_pool.for_each(lambda: worker, (4, 2, 3, 1), MUCH)


@pytest.mark.parametrize(
    "options",
    [{}, {"expert_type": "glu", "top_k": 2}, {"expert_bias": False, "activation": "gelu"}],
    ids=str,
)
def test_experts_in_threads_are_bit_identical_to_experts_computed_one_by_one(
    two_threads, monkeypatch, options
):
    config = MoEConfig(model_dim=24, hidden_dim=40, num_experts=6, top_k=1)
    layer = MoELayer(dataclasses.replace(config, **options), seed=1)
    x = torch.randn(300, 24, generator=torch.Generator().manual_seed(1))
    spread = []

    def results():
        y, _ = layer(x)
        with torch.inference_mode():
            again, _ = layer(x)
        return [y, again, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    found = thread_pool._spread
    monkeypatch.setattr(thread_pool, "_spread", lambda *args: (spread.append(1), found(*args)))
    monkeypatch.setattr(thread_pool, "LEAST_WORK", 0)
    apart = results()
    assert len(spread) == 3
    monkeypatch.setattr(thread_pool, "LEAST_WORK", 2**62)
    for one, other in zip(results(), apart, strict=True):
        assert torch.equal(one, other)
    assert len(spread) == 3
