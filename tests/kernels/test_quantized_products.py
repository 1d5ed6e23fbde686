"""Compares products of int8 and int4 matrices with products of the dequantized matrix, up to rounding."""

import pytest
import torch

from fairseq_tutel.checkpoint.quantized import Quantized
from fairseq_tutel.kernels import quantized
from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.kernels.ffn_by_expert import ffn_forward
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.reference import grouped_linear
from fairseq_tutel.kernels.weights import ExpertTensorList, FFNWeights

# The relative error of a result, measured by norms, if x and the result are rounded to bf16.
ROUNDING = 2**-8
SHAPES = {"int8": [(64, 128), (48, 16), (5, 7), (7, 33), (16, 48)], "int4": [(64, 64), (128, 192)]}
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix_of(kind, shape, dtype=torch.float32, seed=1):
    """Return a random quantized matrix and the dequantized fp32 matrix."""
    generator = torch.Generator().manual_seed(seed)
    form = Quantized(kind, shape, torch.float32)
    stored = form.quantize(torch.randn(shape, generator=generator))
    return form.matrix(stored, dtype), form.dequantize(stored)


def difference(found, expected):
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9))


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_quantized_products_equal_products_with_the_dequantized_matrix(kind, shape, by_kernel, monkeypatch):
    if not by_kernel:
        monkeypatch.setattr(quantized, "has_kernel", lambda kind: False)
        monkeypatch.setattr(quantized, "CONVERTED", 3 * 64)  # The matrix is converted in several blocks.
    exact = not by_kernel or not quantized.has_kernel(kind)
    for dtype in DTYPES:
        matrix, numbers_OI = matrix_of(kind, shape, dtype)
        for rows in (0, 1, 3, 17, 70):
            x = torch.randn(rows, shape[1]).to(dtype)
            for bias in (None, torch.randn(shape[0]).to(dtype)):
                y = matrix.linear(x, bias)
                assert (y.dtype, y.shape) == (dtype, (rows, shape[0]))
                expected = x.double() @ numbers_OI.double().t() + (0 if bias is None else bias.double())
                limit = 1e-5 if exact and dtype == torch.float32 else 2 * ROUNDING
                assert difference(y, expected) < limit, (dtype, rows)


@pytest.mark.parametrize("kind", SHAPES)
def test_quantized_products_accept_rows_that_are_views_of_another_tensor(kind):
    matrix, numbers_OI = matrix_of(kind, (64, 64))
    for dtype in DTYPES:
        wide = torch.randn(5, 3, 65).to(dtype)
        for x in (wide[:, 1, 1:], wide[1:3, 2, :64], wide[0, :, 1:].flip(0), wide.flatten()[3:67][None]):
            assert difference(matrix.linear(x), x.float() @ numbers_OI.t()) < 2 * ROUNDING


def test_a_quantized_product_accepts_an_int8_matrix_at_an_odd_address():
    matrix, numbers_OI = matrix_of("int8", (64, 64))
    for offset in range(1, 17):
        memory = torch.empty(64 * 64 + 32, dtype=torch.int8)
        moved = memory[offset : offset + 64 * 64].view(64, 64).copy_(matrix.values)
        found = quantized.QuantizedMatrix(moved, matrix.scales, torch.float32).linear(torch.eye(64)[:3])
        assert difference(found, numbers_OI.t()[:3]) < ROUNDING


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("is_glu", [False, True])
def test_an_expert_ffn_can_use_quantized_matrices(kind, is_glu):
    model_dim, hidden_dim, counts = 64, 128, [3, 0, 1, 20]
    shapes = {"fc1": (hidden_dim, model_dim), "fc2": (model_dim, hidden_dim)}
    shapes |= {"fc3": (hidden_dim, model_dim)} if is_glu else {}
    ours, plain = {}, {}
    for fc, shape in shapes.items():
        pairs = [matrix_of(kind, shape, seed=expert) for expert in range(len(counts))]
        make = [matrix for matrix, _ in pairs].__getitem__
        name = f"{fc}_weight"
        ours[name] = ExpertTensorList(make, (len(counts), *shape), torch.float32)
        plain[name] = torch.stack([numbers for _, numbers in pairs])
        ours[f"{fc}_bias"] = plain[f"{fc}_bias"] = torch.randn(len(counts), shape[0])
    x_RD, groups = torch.randn(25, model_dim), Groups.of_host(counts, torch.device("cpu"))
    names = [f"{fc}_{part}" for fc in ("fc1", "fc2", "fc3") for part in ("weight", "bias")]
    outs = []
    for tensors in (ours, plain):
        weights = FFNWeights(*[tensors.get(name) for name in names])
        outs.append(ffn_forward(x_RD, None, weights, groups, "relu", keep=False)[0])
    assert difference(*outs) < 2 * ROUNDING and not outs[0][24:].any()
    own = {name: tensor[3] for name, tensor in ours.items()}
    assert torch.equal(ffn_of_few(x_RD[4:24], own, "relu"), outs[0][4:24])
    lists = ours["fc1_weight"], ours["fc1_bias"]
    assert difference(grouped_linear(x_RD, *lists, groups), grouped_linear(x_RD, plain["fc1_weight"],
                      plain["fc1_bias"], groups)) < ROUNDING  # fmt: skip
