"""A cache that is filled when a model is opened: which experts, in which order, and the same output."""

import pytest
import torch
from stored import FFN, as_read, model_of, opened, source_of, write
from test_expert_store import run, steps

from fairseq_tutel import ExpertStore
from fairseq_tutel.inference import expert_store
from fairseq_tutel.inference.options import EVICTIONS, STORE_POLICIES
from fairseq_tutel.parallel import host_memory


@pytest.mark.parametrize("policy", STORE_POLICIES)
@pytest.mark.parametrize("cache", ("0", "4", "1GiB"))
def test_the_output_is_that_of_resident_and_filled_experts_are_not_read_again(tmp_path, policy, cache):
    source = source_of(write(model_of(FFN), tmp_path))
    resident = as_read(model_of(FFN), source)
    with ExpertStore(policy, cache=cache) as store:
        model = opened(FFN, store, source)
        everything = [(layer.experts, e) for e in range(FFN.num_experts) for layer in model]
        store.fill_cache(everything)
        assert store.counters.fetches == {"0": 0, "4": 4, "1GiB": len(everything)}[cache]
        for x_TD in steps(4):
            assert torch.equal(run(model, x_TD)[0], run(resident, x_TD)[0])
        if cache == "1GiB":
            assert store.counters.fetches == len(everything)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_most_used_experts_are_fetched_and_evicted_last(tmp_path, eviction):
    source = source_of(write(model_of(FFN), tmp_path))
    with ExpertStore(cache=2, eviction=eviction) as store:
        model = opened(FFN, store, source)
        store.fill_cache([(model[1].experts, 3), (model[0].experts, 5), (model[0].experts, 0)])
        assert store.counters.fetches == 2
        store.take(0, [1])
        store.take(0, [])  # expert 1 goes to the cache, from which one of the two is evicted
        store.take(1, [3])
        counters = store.counters
        assert counters.fetches + counters.cancelled == 3
        store.take(0, [5])
        assert counters.fetches + counters.cancelled == 4


def test_an_automatic_cache_is_half_of_the_free_memory_at_the_first_fetch(monkeypatch):
    with ExpertStore(tier="host", cache="auto") as store:
        store.add(model_of(FFN)[0].experts)
        size = store._stacks[0][1].layout.num_bytes
        monkeypatch.setattr(expert_store, "free_bytes", lambda device: 4 * size + 1)
        for experts in ([0], [1], [2], [3], [0, 1, 2, 3]):  # two of the first three are in the cache
            store.take(0, experts)
        assert (store.counters.fetches, store.counters.hits) == (5, 3)


def test_ranks_of_a_node_share_its_free_memory(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 600)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert expert_store.free_bytes(torch.device("cpu")) == 150
