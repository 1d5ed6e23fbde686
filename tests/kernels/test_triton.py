"""Compares the Triton kernels, interpreted or compiled, with the reference."""

import pytest
import torch
from cases import DTYPES, SHAPES, TOLERANCE, inputs, name_of
from compare import close
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer, kernels
from fairseq_tutel.kernels import reference

pytest.importorskip("triton")


def compare(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.dtype == expected.dtype, what
    close(got, expected, what, TOLERANCE[got.dtype])


def compare_ops(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    triton_ops = kernels.ops("triton", torch.device(device))
    assert triton_ops is not reference
    i = inputs(*shape, dtype).to(device)
    for op, arguments in (
        ("gather_rows", (i.x_TD, i.index_R)),
        ("gather_rows", (i.x_TD, i.index_R, i.scale_R)),
        ("gather_sum", (i.rows_RD, i.row_of_TK)),
        ("gather_sum", (i.rows_RD, i.row_of_TK, i.weights_TK)),
        ("gather_dot", (i.rows_RD, i.row_of_TK, i.y_TD)),
    ):
        got, expected = (getattr(ops, op)(*arguments) for ops in (triton_ops, reference))
        compare(got, expected, f"{op} with {len(arguments)} arguments")
    parts_PR = i.rows_RD.t()[:3].to(torch.promote_types(dtype, torch.float32))
    for op, arguments in (
        ("gather_pair", (i.x_TD, i.y_TD, i.index_R)),
        ("gather_gradients", (i.rows_RD, i.row_of_TK, parts_PR)),
    ):
        got, expected = (getattr(ops, op)(*arguments) for ops in (triton_ops, reference))
        for result, other in zip(got, expected, strict=True):
            compare(result, other, op)


def compare_strided(device: str) -> None:
    triton_ops = kernels.ops("triton", torch.device(device))
    i = inputs(6, 8, 2, 5, torch.float32).to(device)

    def strided(tensor: Tensor) -> Tensor:
        apart = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        assert not apart.is_contiguous()
        return apart

    x, rows, y = strided(i.x_TD), strided(i.rows_RD), strided(i.y_TD)
    index, row_of = strided(i.index_R), strided(i.row_of_TK)
    scale, weights = strided(i.scale_R), strided(i.weights_TK)
    for op, arguments in (
        ("gather_rows", (x, index, scale)),
        ("gather_sum", (rows, row_of, weights)),
        ("gather_dot", (rows, row_of, y)),
    ):
        compare(getattr(triton_ops, op)(*arguments), getattr(reference, op)(*arguments), op)
    pairs = (ops.gather_pair(x, y, index) for ops in (triton_ops, reference))
    for got, expected in zip(*pairs, strict=True):
        compare(got, expected, "gather_pair")


LAYERS = (
    {},
    {"capacity_factor": 0.5},
    {"capacity_factor": 0.5, "prescore": True},
    {"choice": "experts", "normalize_gate": "after"},
    {"second_expert_policy": "random", "residual": True},
)


def run_layer(backend: str, dtype: torch.dtype, device: str, options: dict) -> dict[str, Tensor]:
    config = MoEConfig(model_dim=6, hidden_dim=5, num_experts=3, top_k=2, backend=backend, **options)
    layer = MoELayer(config, seed=1).to(device, dtype)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 6, generator=generator).to(device, dtype).requires_grad_()
    padding_mask = torch.zeros(9, dtype=torch.bool, device=device)
    padding_mask[4] = True
    torch.manual_seed(3)
    y, output = layer(x, padding_mask)
    (y.square().sum() + output.balance_loss).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def compare_layers(dtype: torch.dtype, device: str) -> None:
    for options in LAYERS:
        ours = run_layer("triton", dtype, device, options)
        # The interpreter always sums in the same order, so one run is enough.
        again = run_layer("triton", dtype, device, options) if device == "cuda" else ours
        plain = run_layer("reference", dtype, device, options)
        for name, expected in plain.items():
            compare(ours[name], expected, name)
            if "experts" not in name:  # on a GPU, torch computes experts in fp64
                assert torch.equal(ours[name], again[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_interpreted_ops_equal_the_reference(interpreter, shape, dtype):
    interpreter.run(compare_ops, shape, dtype, "cpu")


def test_interpreted_ops_on_rows_wider_than_a_block_equal_the_reference(interpreter):
    interpreter.run(compare_ops, (2, 3, 2, 1500), torch.float32, "cpu")


def test_interpreted_ops_support_strided_inputs(interpreter):
    interpreter.run(compare_strided, "cpu")


@pytest.mark.parametrize(
    "dtype", (pytest.param(torch.float64, marks=pytest.mark.long), torch.bfloat16), ids=name_of
)
def test_outputs_and_gradients_of_an_interpreted_layer_equal_the_reference(interpreter, dtype):
    interpreter.run(compare_layers, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", (*SHAPES, (64, 100, 2, 1500)), ids=name_of)
def test_compiled_ops_equal_the_reference(shape, dtype):
    compare_ops(shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=name_of)
def test_outputs_and_gradients_of_a_compiled_layer_equal_the_reference(dtype):
    compare_layers(dtype, "cuda")


@pytest.mark.gpu
def test_compiled_kernels_support_strided_inputs():
    compare_strided("cuda")
