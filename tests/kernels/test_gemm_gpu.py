"""The tests run the compiled matrix products of experts on a GPU with the tiles of real layers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from ffn_cases import ACTS, Case, compare, inputs, run, skewed

from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference, tiles, triton_launch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

LAYER = Case(skewed(1000, 5), tail=40, model_dim=256, hidden_dim=384, dtype=torch.bfloat16)


def compare_compiled(case: Case) -> None:
    compare(kernels.ops("triton", torch.device("cuda")), reference, case, "cuda")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Disable TF32, so that the fp32 products of the reference are precise."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("num_rows", (0, 1, 63, 1000, 4096))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("glu", (False, True), ids=("gelu", "glu"))
def test_compiled_ffn_ops_equal_fp64_for_any_number_of_rows(num_rows, dtype, glu):
    counts = skewed(num_rows, 5)
    compare_compiled(replace(LAYER, counts=counts, dtype=dtype, glu=glu, activation="gelu"))


@pytest.mark.parametrize("activation", ACTS)
def test_compiled_ffn_ops_equal_fp64_for_every_activation(activation):
    compare_compiled(replace(LAYER, activation=activation))


@pytest.mark.parametrize(
    "case",
    (
        # Tensor descriptors do not support these dimensions.
        replace(LAYER, model_dim=250, hidden_dim=130, glu=True),
        replace(LAYER, gathered=False, glu=True),
        replace(LAYER, strided=True, keep=False, glu=True),
        replace(LAYER, counts=(3,) * 130, bias=False),
        replace(LAYER, counts=(0, 0, 0)),
    ),
    ids=str,
)
def test_compiled_ffn_ops_equal_fp64_for_special_shapes_and_options(case):
    compare_compiled(case)


@pytest.mark.parametrize("kind", tiles.KINDS.split())
def test_compiled_ffn_ops_equal_fp64_with_every_tile_of_the_table(kind, monkeypatch):
    activation = "gelu" if kind in ("up", "hidden") else "relu"
    case, taken = replace(LAYER, glu=kind.startswith("glu"), activation=activation), set()
    hardware = triton_launch.hardware_of(torch.device("cuda:0"))
    for row in tiles.rows_of(kind, hardware, "half"):

        def choose(asked, *shape, tile=row.tile):
            taken.update([tile] if asked == kind else [])
            return tile if asked == kind else tiles.choose(asked, *shape)

        monkeypatch.setattr(triton_launch, "choose", choose)
        compare_compiled(case)
    assert taken


def test_backward_runs_in_a_thread_without_a_cuda_context():
    """The main thread loads every kernel first, because loading gives a thread a CUDA context."""
    case = replace(LAYER, gathered=False, glu=True)
    ops, given = kernels.ops("triton", torch.device("cuda")), inputs(case, "cuda")
    expected = run(ops, case, given)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run, ops, case, given).result()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_compiled_kernels_give_bit_identical_results_in_every_run():
    case = replace(LAYER, glu=True)
    ops, given = kernels.ops("triton", torch.device("cuda")), inputs(case, "cuda")
    first, second = run(ops, case, given), run(ops, case, given)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_cuda_graph_uses_the_current_row_counts():
    case = replace(LAYER, glu=True)
    ops, given = kernels.ops("triton", torch.device("cuda")), inputs(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(ops, case, given)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(ops, case, given)
    # The new row counts have the same sum as the row counts at graph capture. If the host had read the
    # counts during the capture, the graph would use the old counts.
    other = replace(case, counts=tuple(reversed(case.counts)))
    given["counts"].copy_(torch.tensor(other.counts))
    graph.replay()
    expected = run(ops, other, given)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in captured.items())
