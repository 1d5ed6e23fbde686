"""The tests compare experts in a store with experts in memory, and count the fetches of the store."""

import itertools

import pytest
import torch
import torch.distributed as dist
from compare import close
from python_gpu import WITHOUT_GPU, gpu
from stored import BLOCKS, FFN, KINDS, as_read, model_of, opened, source_of, write

from fairseq_tutel import ExpertStore, make_topology
from fairseq_tutel.checkpoint.quantized import EXPERT_DTYPES, Quantized
from fairseq_tutel.inference import expert_store
from fairseq_tutel.inference.expert_buffers import BufferLayout, buffers_on_host
from fairseq_tutel.inference.options import STORE_POLICIES, STORE_TIERS
from fairseq_tutel.moe.call import Call
from fairseq_tutel.parallel import host_memory

CACHE = 2


@torch.no_grad()
def run(model, x_TD):
    """Return the output of a pre-gated model and the experts that have rows in each block."""
    used, routing = [], None
    for block, layer in enumerate(model):
        call = Call.of(x_TD, x_TD.shape[1])
        routing = layer.route(x_TD, call) if routing is None else routing
        following = None
        if block + 1 < len(model):
            after = model[block + 1]
            following = after.route(x_TD, call)
            after.experts.weights.prefetch(after.experts, following.groups)
        used.append(set(routing.counts_E.nonzero().flatten().tolist()))
        x_TD = x_TD + layer.apply_routing(x_TD, routing)
        routing = following
    return x_TD, used


def steps(count, rank=0, width=8):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1 + (i + rank) % 3, width, generator=generator) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "tier", "packing"),
    [
        *itertools.product(["ffn"], STORE_TIERS, ["", *EXPERT_DTYPES]),
        ("glu, norm", "disk", ""),
        ("glu, norm", "host", "int8"),
        ("own", "disk", "int4"),
        ("wide", "disk", "int8"),
        ("wide", "disk", "int4"),
    ],
)
def test_every_store_policy_gives_bit_identical_outputs_to_experts_in_memory(tmp_path, kind, tier, packing):
    config = KINDS[kind]
    source = source_of(write(model_of(config), tmp_path, packing))
    resident = as_read(model_of(config), source)
    caches = (0, CACHE, "1GiB")  # Quantized experts run with one policy per cache size.
    ways = zip(STORE_POLICIES, caches, strict=True)
    for policy, cache in ways if packing else itertools.product(STORE_POLICIES, caches):
        with ExpertStore(policy, tier, cache, compute="unpacked") as store:
            model = opened(config, store, source)
            for x_TD in [*steps(3, width=config.model_dim), torch.randn(0, config.model_dim)]:
                assert torch.equal(run(model, x_TD)[0], run(resident, x_TD)[0]), (policy, cache)


@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["wide", "wide glu", "wide norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_computes_with_experts_that_stay_quantized(tmp_path, kind, packing, dtype, monkeypatch):
    config = KINDS[kind]
    source = source_of(write(model_of(config), tmp_path, packing))
    resident, found = as_read(model_of(config), source), []
    batches = [*steps(3, width=64), torch.randn(70, 64), torch.randn(0, 64)]
    for policy, tier, cache in zip(STORE_POLICIES, ("disk", "host", "disk"), (0, CACHE, 1), strict=True):
        with ExpertStore(policy, tier, cache) as store:
            model = opened(config, store, source).to(dtype)
            monkeypatch.setattr(Quantized, "dequantize", None)  # Dequantizing would raise an error.
            found.append([run(model, x_TD.to(dtype))[0] for x_TD in batches])
            with torch.no_grad():
                firsts = [model[0](x_TD.to(dtype))[0] for x_TD in batches]
            monkeypatch.undo()
    assert all(torch.equal(*pair) for others in found[1:] for pair in zip(found[0], others, strict=True))
    # Only the first layer in fp32 is compared: elsewhere, rounding could change which experts tokens use.
    for x_TD, y_TD in zip(batches, firsts, strict=True) if dtype == torch.float32 else ():
        expected = resident[0](x_TD)[0]
        assert (y_TD - expected).norm() <= 2**-6 * expected.norm()


@pytest.mark.parametrize("policy", STORE_POLICIES)
def test_every_store_policy_fetches_and_keeps_the_expected_numbers_of_experts(tmp_path, policy):
    resident = model_of(FFN)
    source, size = source_of(write(resident, tmp_path)), FFN.num_experts
    with ExpertStore(policy) as store:
        model = opened(FFN, store, source)
        n = [len(used) for x_TD in steps(5) for used in run(model, x_TD)[1]]
        counters = store.counters
    ahead = {
        "on-demand": ([0] * len(n), 0),
        "pregated": ([0 if i % BLOCKS == BLOCKS - 1 else n[i + 1] for i in range(len(n))], 0),
        "prefetch-all": ([size] * len(n), n[0]),
    }[policy]
    assert counters.calls == len(n)
    assert counters.asked == sum(n)
    assert counters.hits == 0
    assert counters.cancelled == 0 or policy == "prefetch-all"
    assert counters.fetches + counters.cancelled == (ahead[1] + sum(ahead[0]) if ahead[1] else sum(n))
    assert counters.peak_experts == max(map(sum, zip(n, ahead[0], strict=True)))
    (expert_bytes,) = {sum(t[0].nbytes for t in resident[0].experts.expert_parameters().values())}
    assert counters.bytes >= counters.fetches * expert_bytes
    assert counters.peak_bytes * counters.fetches == counters.bytes * counters.peak_experts


def test_a_cached_expert_in_use_is_not_evicted():
    with ExpertStore(tier="host", cache=1) as store:
        store.add(model_of(FFN)[0].experts)
        for experts in ([0], [1], [0, 1], [0, 2]):
            store.take(0, experts)
        # Expert 0 is in use when the store caches expert 1.
        assert (store.counters.fetches, store.counters.hits) == (3, 3)


def test_an_automatic_cache_takes_half_of_the_free_memory_at_the_first_fetch(monkeypatch):
    with ExpertStore(tier="host", cache="auto") as store:
        store.add(model_of(FFN)[0].experts)
        size = store._stacks[0][1].layout.num_bytes
        monkeypatch.setattr(expert_store, "free_bytes", lambda device: 4 * size + 1)
        for experts in ([0], [1], [2], [3], [0, 1, 2, 3]):  # The last call fetches one expert.
            store.take(0, experts)
        assert (store.counters.fetches, store.counters.hits) == (5, 3)


def test_the_ranks_of_a_node_divide_its_free_memory_equally(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 600)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert expert_store.free_bytes(torch.device("cpu")) == 150


def compare_on_gpu(folder, tier, count, device):
    source = source_of(folder)
    resident = as_read(model_of(FFN), source)
    for policy in STORE_POLICIES:
        with ExpertStore(policy, tier, cache=1) as store:
            model = opened(FFN, store, source).to(device)
            for x_TD in steps(count):
                close(run(model, x_TD.to(device))[0].cpu(), run(resident, x_TD)[0], policy)


def compare_on_gpu_in_python(folder):
    with gpu() as device:
        compare_on_gpu(folder, "host", 3, device.name)


@WITHOUT_GPU
def test_on_an_emulated_gpu_two_streams_never_use_a_buffer_of_the_store_at_once(ranks, tmp_path):
    ranks(1, on_gpus=True).run(compare_on_gpu_in_python, write(model_of(FFN), tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", STORE_TIERS)
def test_on_a_gpu_the_store_never_writes_a_buffer_while_it_is_read(tmp_path, tier):
    compare_on_gpu(write(model_of(FFN), tmp_path), tier, 20, "cuda")


@pytest.mark.parametrize("count", (8, 64))
def test_host_buffers_waste_little_memory_if_allocations_are_rounded_up_to_powers_of_two(count):
    layout = BufferLayout.of({"weight": (torch.uint8, (2**10 + 8,), None)})
    buffers = buffers_on_host(layout, count)
    blocks = [buffer.memory.untyped_storage() for buffer in buffers]
    sizes = {block.data_ptr(): block.nbytes() for block in blocks}.values()
    assert len(buffers) == count
    assert sum(2 ** (size - 1).bit_length() for size in sizes) <= (count + 2) * layout.num_bytes


def compare_on_two_ranks(kind, folder):
    config, rank = KINDS[kind], dist.get_rank()
    source = source_of(folder)
    topology = make_topology([config.num_experts], 2)
    resident = as_read(model_of(config, topology), source)
    for policy, tier in itertools.product(STORE_POLICIES, STORE_TIERS):
        with ExpertStore(policy, tier, cache=1, compute="unpacked") as store:
            model = opened(config, store, source, topology)
            for x_TD in [*steps(2, rank), torch.randn(3 * rank, 8)]:
                assert torch.equal(run(model, x_TD)[0], run(resident, x_TD)[0]), (policy, tier)
            assert store.counters.peak_experts <= config.num_experts + 1
            with torch.no_grad():
                model[0].run_without_tokens()


@pytest.mark.parametrize(("kind", "packing"), [("ffn", ""), ("own", "int4")])
def test_stores_on_two_ranks_give_the_outputs_of_experts_in_memory(ranks, kind, packing, tmp_path):
    write(model_of(KINDS[kind]), tmp_path, packing)
    ranks(2).run(compare_on_two_ranks, kind, tmp_path)
