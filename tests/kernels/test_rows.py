"""The tests compare slots and rows of assignments with brute force, in plain torch and in Triton.

On a GPU (`-m gpu`), compiled kernels run with 100,000 tokens and without host synchronization.
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from route_cases import asking, by_counting, order, rows_by_counting, sentence_first
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference
from fairseq_tutel.kernels.reference_route import Rows

# Each case is K, (time, batch) and E: no token, one token, several token blocks or several expert tiles.
SLOTS = (
    (2, (0, 3), 4),
    (1, (1, 1), 1),
    (3, (9, 7), 5),
    (1, (63, 1), 8),
    (2, (10, 100), 3),
    (4, (7, 5), 100),
)


def masks(ids_KT: Tensor, num_experts: int) -> Iterator[Tensor | None]:
    """Yield no mask, a mask of assignments with an expert, and a mask of tokens with stride 0."""
    yield None
    yield (ids_KT < num_experts).t().contiguous()
    yield (ids_KT[:1] < num_experts).t().expand(ids_KT.shape[1], len(ids_KT))


def compare_rows(backend: str, shape: tuple[int, tuple[int, int], int], device: str) -> None:
    ops = kernels.ops(backend, torch.device(device))
    top_k, (time, batch), num_experts = shape
    drawn_KT, order_N = asking(top_k, time * batch, num_experts), order(top_k, time * batch)
    ids_KT = drawn_KT.clamp_max(num_experts - 1)
    orders = (
        (None, None, list(range(ids_KT.numel()))),
        (None, (time, batch), sentence_first(top_k, time, batch)),
        (order_N.to(device), None, order_N.tolist()),
    )
    limits = None, 0, 7
    for i, asked_TK in enumerate(masks(drawn_KT, num_experts)):
        wanted_KT = ids_KT if asked_TK is None else ids_KT.where(asked_TK.t(), num_experts)
        mask_TK = None if asked_TK is None else asked_TK.to(device)
        for j, (order_there, time_first, copies) in enumerate(orders):
            if time * batch > 100 and i != j:
                continue  # The interpreter is too slow for all combinations.
            slots, assigned = by_counting(wanted_KT, copies, num_experts)
            limit = limits[(i + j) % 3]
            bound = None if limit is None else torch.tensor(limit, device=device)
            ids_TK = ids_KT.t().to(device)
            got = ops.assign_rows(ids_TK, num_experts, mask_TK, order_there, time_first, bound)
            assert all(t is None or t.dtype == torch.int64 for t in got)
            assert got.slots_TK.tolist() == slots and got.assigned_KE.tolist() == assigned
            check_rows(got, ids_KT.t(), slots, limit, num_experts)


def check_rows(got: Rows, ids_TK: Tensor, slots: list[list[int]], limit: int | None, experts: int) -> None:
    expected = rows_by_counting(ids_TK, slots, limit, experts)
    assert got.counts_E.tolist() == expected["counts"]
    assert got.dropped_K.tolist() == expected["dropped"]
    assert got.row_of_TK.tolist() == expected["row_of"] and got.row_of_TK.is_contiguous()
    sources, top_k = got.source_of_R.tolist(), ids_TK.shape[1]
    used = len(expected["sources"])
    assert sources[:used] == expected["sources"]
    assert all(source == -1 for source in sources[used:])
    assert got.token_of_R.tolist() == [source // top_k for source in sources]
    if got.tiles is not None and sources:
        from fairseq_tutel.kernels.triton_tiles import row_tiles

        assert torch.equal(got.tiles, row_tiles(got.counts_E, len(sources)))


def compare_long_scan(device: str) -> None:
    """Compare the kernel `scan` with the reference on more blocks and experts than one tile has."""
    from fairseq_tutel.kernels import triton_place

    block = 16 if device == "cpu" else triton_place.SCAN_BLOCK_B  # The interpreter is slow.
    drawn_KT = asking(1, (block + 2) * triton_place.BLOCK_N, 9).to(device)
    arguments = drawn_KT.clamp_max(8).t(), 9, (drawn_KT < 9).t()
    with mock.patch.object(triton_place, "SCAN_BLOCK_B", block):
        found = kernels.ops("triton", drawn_KT.device).assign_rows(*arguments)
    compare_all(found, reference.assign_rows(*arguments))


def compare_all(got: Rows, expected: Rows) -> None:
    """Compare all fields except unused rows at the end, which the reference does not return on a CPU."""
    used = int(expected.counts_E.sum())
    for name in set(Rows._fields) - {"tiles"}:
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert torch.equal(ours[:used], theirs[:used]) if name.endswith("R") else torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SLOTS, ids=str)
def test_slots_and_rows_equal_brute_force(shape):
    compare_rows("reference", shape, "cpu")


@pytest.fixture
def _triton():
    pytest.importorskip("triton")


triton = pytest.mark.usefixtures("_triton")


@triton
@pytest.mark.parametrize("shape", SLOTS, ids=str)
def test_interpreted_slots_and_rows_equal_brute_force(interpreter, shape):
    interpreter.run(compare_rows, "triton", shape, "cpu")


@triton
def test_an_interpreted_scan_over_several_tiles_equals_the_reference(interpreter):
    interpreter.run(compare_long_scan, "cpu")


@pytest.mark.gpu
def test_compiled_slots_and_rows_equal_brute_force():
    for shape in SLOTS:
        compare_rows("triton", shape, "cuda")
    compare_long_scan("cuda")


@pytest.mark.gpu
def test_100_000_tokens_need_no_table_of_token_expert_pairs_and_no_host_synchronization():
    drawn_KT = asking(8, 100_000, 256).cuda()
    ids_TK, asked_TK = drawn_KT.clamp_max(255).t().contiguous(), (drawn_KT < 256).t().contiguous()
    order_N, limit = order(8, 100_000).cuda(), torch.tensor(4000).cuda()
    given = ((ids_TK, 256, asked_TK), (ids_TK, 256, asked_TK, order_N, None, limit))
    ops = kernels.ops("triton", ids_TK.device)
    for arguments in given:
        ops.assign_rows(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    found = []
    try:
        for arguments in given:
            found.append(ops.assign_rows(*arguments))
            # The memory limit allows four maps of the assignments and one table of blocks. A table with one
            # byte for each pair of token and expert would exceed the memory limit.
            assert torch.cuda.max_memory_allocated() - before < 2 * len(found) * 100_000 * 256
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, arguments in zip(found, given, strict=True):
        compare_all(got, reference.assign_rows(*arguments))
