"""Plans whose ranks share a device: their table, its execution in plain torch, and the Triton kernel.

On a GPU (`-m gpu`) all lanes run at once: 100 000 calls with different data, so that a stale read shows.
Interpreted, lanes cannot wait for each other, so they run level by level, in separate launches. The
interpreter truncates to bf16 and does not round.
"""

from types import SimpleNamespace

import plans
import pytest
import torch

from fairseq_tutel.kernels.reference_plan import WAIT
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors.one_device import OnOneDevice
from fairseq_tutel.plans.format import Plan, Writer
from fairseq_tutel.plans.generators import make

pytest.importorskip("triton")


def compare(plan: Plan, m, dtype: torch.dtype, backend: str, calls: int = 3, device="cpu") -> None:
    """Compare calls in a row with the plan's moves one after another, bit for bit."""
    runner = OnOneDevice(plan, m, torch.device(device), backend)
    generator = torch.Generator(device).manual_seed(calls)
    ins = [
        (100 * torch.randn(size, calls, generator=generator, device=device)).to(dtype)
        for size in runner.sizes[: plan.ranks]
    ]
    got = runner.run([own.T for own in ins])
    for rank, expected in enumerate(plans.result(plan, m, ins)):
        assert torch.equal(got[rank].T, expected), (plan.name, m, rank)


def two_lanes() -> Plan:
    """Return an all_gather in which a lane puts chunks that another lane has copied."""
    w = Writer(2, "ll")
    for rank in range(2):
        w.copy(rank, ("in", 0), ("tmp", 0), lane=0)
        w.post(rank, 0, lane=0)
        w.copy(rank, ("in", 0), ("out", rank), lane=0)
        w.pend(rank, 0, lane=1)
        w.put(rank, 1 - rank, ("tmp", 0), ("tmp", 1), lane=1)
        w.signal(rank, 1 - rank, lane=1)
        w.wait(rank, 1 - rank, lane=1)
        w.copy(rank, ("tmp", 1), ("out", 1 - rank), lane=1)
    plan = w.plan("two lanes", "all_gather", 1, temporary=2)
    check(plan)
    return plan


def blocks() -> tuple[Plan, tuple[tuple[int, ...], ...]]:
    """Test rows of an all_to_all of unequal blocks, through other ranks."""
    sizes = tuple(tuple((3 * s + 5 * d) % 4 for d in range(4)) for s in range(4))
    return make("two_hops", "all_to_all", 4, nodes=2), sizes


def compare_interpreted() -> None:
    compare(make("two_phase", "all_reduce", 3), 7, torch.float16, "triton", calls=1)
    compare(two_lanes(), 7, torch.float16, "triton", calls=1)
    compare(*blocks(), torch.int64, "triton", calls=1)
    compare(make("one_phase", "all_reduce", 2), 300, torch.float32, "triton", calls=1)  # a block has 256
    compare(make("one_phase", "all_reduce", 2), 0, torch.float32, "triton", calls=1)


def compare_memory() -> None:
    """Test each element of the memory after more calls than it has temporary halves."""
    from fairseq_tutel.kernels import reference_plan, triton_plan

    calls, table = 3, OnOneDevice(make("ring", "all_reduce", 3), 4, torch.device("cpu")).table
    size = calls * table.call_elements
    memory = torch.cat([torch.arange(1, size + 1), torch.zeros(2 * table.tmp_elements).long()])
    got, expected = memory.clone(), memory.clone()
    for run_plan, mine in ((triton_plan.run_plan, got), (reference_plan.run_plan, expected)):
        assert (run_plan(mine, table, calls) == -1).all()
    assert torch.equal(got, expected)
    assert (got[size:] != 0).all()


def wait_in_vain(backend: str, device: str, spins: int) -> None:
    runner = OnOneDevice(make("ring", "all_reduce", 3), 4, torch.device(device), backend)
    rows = runner.table.rows
    last = int((rows[:, 0] == WAIT).nonzero()[-1])
    rows[last, 3] += 1  # in the second call it waits for a signal that does not come
    channel = rows[last, 1]
    ins = [torch.ones(2, 4, device=device) for _ in range(3)]
    with pytest.raises(RuntimeError, match=rf"no signal: .*rank 2, lane 0 for channel {channel}\b"):
        runner.run(ins, spins)


@pytest.mark.parametrize("ranks", (3, 4))
def test_the_table_gives_what_the_plan_does(ranks):
    for plan in plans.of(ranks):
        for m in (0, 1, 7):
            compare(plan, m, torch.float32, "reference")
        compare(plan, 7, torch.bfloat16, "reference", calls=1)
    compare(*blocks(), torch.int64, "reference")
    compare(two_lanes(), 7, torch.float16, "reference")


def test_interpreted_plans_give_the_same_bits(interpreter):
    interpreter.run(compare_interpreted)
    interpreter.run(compare_memory)


def test_a_wait_in_vain_is_named(interpreter):
    wait_in_vain("reference", "cpu", 1)
    interpreter.run(wait_in_vain, "triton", "cpu", 1)


def test_more_lanes_than_run_at_once_are_refused(monkeypatch):
    from fairseq_tutel.kernels.triton_plan import run_plan

    gpu = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    table = OnOneDevice(make("ring", "all_reduce", 3), 4, torch.device("cpu")).table
    with pytest.raises(
        ValueError, match=r"3 lanes that must run together, but the GPU runs at most 2; use a plan"
    ):
        run_plan(torch.zeros(1), table, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("ranks", (2, 8))
def test_compiled_plans_give_the_same_bits(ranks, dtype):
    for plan in plans.of(ranks):
        for m in (0, 61, 3000):
            compare(plan, m, dtype, "triton", device="cuda")
    compare(*blocks(), torch.int64, "triton", device="cuda")
    compare(two_lanes(), 7, dtype, "triton", calls=1000, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("one_phase", "two_phase", "ring"))
@pytest.mark.parametrize("ranks", (8, 16))
def test_no_read_is_stale_in_a_hundred_thousand_calls(name, ranks):
    plan = make(name, "all_reduce", ranks)
    compare(plan, 61, torch.float32, "reference", device="cuda")  # plain torch, for comparison
    for _ in range(10):
        compare(plan, 61, torch.float32, "triton", calls=10_000, device="cuda")


@pytest.mark.gpu
def test_a_compiled_wait_in_vain_is_named():
    wait_in_vain("triton", "cuda", 1000)
