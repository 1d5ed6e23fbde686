"""Compares Triton's interpreted grouped matrix products with the reference and an fp64 loop."""

from dataclasses import replace

import pytest
import torch
from ffn_cases import ACTS, Case, compare, inputs, run, skewed, with_tiles
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference

pytest.importorskip("triton")

SMALL = Case(skewed(20, 3))


def compare_interpreted(case: Case) -> None:
    compare(kernels.ops("triton", torch.device("cpu")), reference, case, "cpu")


@pytest.mark.parametrize("num_rows", (0, 1, 63))
def test_interpreted_ffn_ops_equal_fp64_for_any_number_of_rows(interpreter, num_rows):
    case = Case(skewed(num_rows, 5), model_dim=16, hidden_dim=20, glu=True)
    interpreter.run(compare_interpreted, case)


@pytest.mark.parametrize("activation", ACTS)
def test_interpreted_ffn_ops_equal_fp64_for_every_activation(interpreter, activation):
    interpreter.run(compare_interpreted, replace(SMALL, activation=activation, bias=False))


@pytest.mark.parametrize(
    "dtype, glu", [(torch.float64, True), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_interpreted_ffn_ops_equal_fp64_in_every_dtype(interpreter, dtype, glu):
    interpreter.run(compare_interpreted, replace(SMALL, dtype=dtype, glu=glu, activation="gelu"))


@pytest.mark.parametrize(
    "case",
    (
        replace(SMALL, glu=True, keep=False),
        replace(SMALL, activation="gelu", keep=False, tail=0),
        replace(SMALL, gathered=False),
        replace(SMALL, gathered=False, glu=True, bias=False),
        pytest.param(replace(SMALL, gated=False), marks=pytest.mark.long),
        replace(SMALL, gated=False, glu=True),
        replace(SMALL, strided=True, glu=True),
        Case((7,), tail=0),
        Case((5, 3), model_dim=100, hidden_dim=17),
        Case((0, 0, 0), tail=20),
        Case((16, 32, 1), tail=15, model_dim=16, hidden_dim=16),
        pytest.param(  # The number of experts affects only the tile table, which another test checks.
            Case((1,) * 70, tail=1, model_dim=16, hidden_dim=16), marks=pytest.mark.long
        ),
    ),
    ids=str,
)
def test_interpreted_ffn_ops_equal_fp64_for_special_shapes_and_options(interpreter, case):
    interpreter.run(compare_interpreted, case)


def compare_tf32x3(case: Case) -> None:
    from fairseq_tutel.kernels import triton_launch

    found = []
    triton_launch.product_of.cache_clear()
    multiply = triton_launch.input_precision_of
    triton_launch.input_precision_of = lambda *given: found.append(multiply(*given)) or found[-1]
    try:
        device = torch.device("cpu")
        compare(kernels.ops("triton", device, fp32_products="tf32x3"), reference, case, "cpu")
    finally:
        triton_launch.input_precision_of = multiply
    assert set(found) == {"tf32x3"}


def test_interpreted_ffn_ops_equal_fp64_with_three_tf32_products(interpreter):
    interpreter.run(compare_tf32x3, replace(SMALL, glu=True))


def test_tf32x3_changes_only_the_precision_of_fp32_products(monkeypatch):
    from fairseq_tutel.kernels.triton_launch import precision_of

    dtypes = torch.float32, torch.float64, torch.bfloat16
    assert [precision_of(dtype, True) for dtype in dtypes] == ["tf32x3", "ieee", "half"]
    assert [precision_of(dtype) for dtype in dtypes] == ["ieee", "ieee", "half"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert precision_of(torch.float32, True) == "ieee"


def compare_in_tiles_of_a_gpu(case: Case) -> None:
    from fairseq_tutel.kernels import tiles, triton_launch

    triton_launch.choose = lambda *_: tiles.Tile(128, 256, 64, 8, 4)
    try:
        compare_interpreted(case)
    finally:
        triton_launch.choose = tiles.choose


@pytest.mark.parametrize("glu", (pytest.param(False, marks=pytest.mark.long), True), ids=("gelu", "glu"))
def test_interpreted_ffn_ops_with_the_tile_size_of_a_gpu_equal_an_fp64_reference(interpreter, glu):
    # The rows give complete tiles, partial tiles, and an expert without rows.
    case = Case((130, 0, 70), model_dim=136, hidden_dim=150, activation="gelu", glu=glu)
    interpreter.run(compare_in_tiles_of_a_gpu, case)


def compare_described(case: Case) -> None:
    from fairseq_tutel.kernels import triton_launch

    used = []
    plain, hardware = triton_launch.descriptor, triton_launch.DESCRIPTORS

    def counting(*given):
        used.append(plain(*given))
        return used[-1]

    triton_launch.descriptor, triton_launch.DESCRIPTORS = counting, ("interpreted",)
    triton_launch.product_of.cache_clear()
    try:
        compare_interpreted(case)
    finally:
        triton_launch.descriptor, triton_launch.DESCRIPTORS = plain, hardware
        triton_launch.product_of.cache_clear()
    assert used and None not in used


@pytest.mark.parametrize("half, gathered", [(False, False), (True, False), (True, True)])
def test_interpreted_ffn_ops_equal_fp64_with_tensor_descriptors(interpreter, half, gathered):
    # Each expert with rows has 20 rows. In half precision, weight gradients read 16 of them in a block.
    case = replace(with_tiles(SMALL), counts=skewed(40, 3), glu=True, strided=gathered, gathered=gathered)
    interpreter.run(compare_described, replace(case, dtype=torch.bfloat16 if half else torch.float32))


def make_tables() -> None:
    from fairseq_tutel.kernels.triton_tiles import BLOCKS_M, num_tiles, row_tiles, table_start

    for counts, num_rows in (
        ((5, 0, 16, 17), 40),
        ((0,), 0),
        ((3,), 3),
        ((1,) * 130, 500),
        ((700, 40), 801),
    ):
        tiles = row_tiles(torch.tensor(counts), num_rows)
        firsts = [sum(counts[:e]) for e in range(len(counts) + 1)]
        assert tiles[: len(counts) + 1].tolist() == firsts
        for block in BLOCKS_M:
            expected = []
            ends = [*firsts[1:], num_rows]
            for e, (first, end) in enumerate(zip(firsts, ends, strict=True)):
                owner = e if e < len(counts) else -1
                expected += [(owner, row, end) for row in range(first, end, block)]
            size, start = (f(num_rows, len(counts), block) for f in (num_tiles, table_start))
            table = tiles[start : start + 3 * size].view(3, size).T.tolist()
            assert [tuple(row) for row in table[: len(expected)]] == expected, (counts, block)
            assert all(first >= end for _, first, end in table[len(expected) :]), (counts, block)
        assert len(tiles) == start + 3 * size


def test_the_tile_table_lists_the_row_tiles_of_all_experts(interpreter):
    interpreter.run(make_tables)


def not_a_number() -> None:
    ops = kernels.ops("triton", torch.device("cpu"))
    case = Case((4,), tail=0, model_dim=8, hidden_dim=8)
    for activation in ACTS:
        given = inputs(replace(case, activation=activation), "cpu")
        given["x"][given["index"][0]] = float("nan")
        results = run(ops, replace(case, activation=activation), given)
        for name in ("a", "out", "dfc1"):
            assert results[name].isnan().any(), f"{name} of {activation}"


def test_nan_in_the_input_stays_nan_through_every_activation(interpreter):
    interpreter.run(not_a_number)


@pytest.mark.parametrize("glu", (False, True), ids=("relu", "glu"))
def test_ffn_ops_on_fake_cuda_tensors_return_shapes_without_a_host_synchronization(glu):
    from fairseq_tutel.kernels import triton_ops

    case = replace(SMALL, glu=glu)
    given = inputs(case, "cpu")
    real = run(reference, case, given)
    with FakeTensorMode():
        fakes = {
            name: None if t is None else torch.empty(t.shape, dtype=t.dtype, device="cuda")
            for name, t in given.items()
        }
        fake = run(triton_ops, case, fakes)
        with pytest.raises(DataDependentOutputException):  # Every host read raises this error.
            run(reference, case, fakes)
    assert all(tensor.device.type == "cuda" for tensor in fake.values())
    for name, tensor in real.items():
        assert (fake[name].shape, fake[name].dtype) == (tensor.shape, tensor.dtype), name


def compile_chain(case: Case) -> None:
    ops, given = kernels.ops("triton", torch.device("cpu")), inputs(case, "cpu")
    compiled = torch.compile(lambda given: run(ops, case, given), backend="aot_eager", fullgraph=True)
    expected = run(ops, case, given)
    for name, tensor in compiled(given).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.long
def test_torch_compile_compiles_the_ffn_ops_as_one_graph(interpreter):
    interpreter.run(compile_chain, replace(SMALL, glu=True))
