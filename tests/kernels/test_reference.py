"""Compares the plain torch ops with direct indexing in fp64."""

import pytest
import torch
from cases import DTYPES, SHAPES, TOLERANCE, inputs, name_of
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference


def direct_rows(x_TD: Tensor, index_R: Tensor, scale_R: Tensor | None) -> Tensor:
    rows_RD = torch.zeros(index_R.shape[0], x_TD.shape[1], dtype=torch.float64)
    for r, t in enumerate(index_R.tolist()):
        if t >= 0:
            rows_RD[r] = x_TD[t].double() * (1 if scale_R is None else scale_R[r].double())
    return rows_RD


def direct_sum(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    y_TD = torch.zeros(row_of_TK.shape[0], rows_RD.shape[1], dtype=torch.float64)
    for t, rows in enumerate(row_of_TK.tolist()):
        for j, r in enumerate(rows):
            if r >= 0:
                weight = 1 if weights_TK is None else weights_TK[t, j].double()
                y_TD[t] += weight * rows_RD[r].double()
    return y_TD


def direct_dot(rows_RD: Tensor, row_of_TK: Tensor, y_TD: Tensor) -> Tensor:
    dots_TK = torch.zeros(row_of_TK.shape, dtype=torch.float64)
    for t, rows in enumerate(row_of_TK.tolist()):
        for j, r in enumerate(rows):
            if r >= 0:
                dots_TK[t, j] = torch.dot(rows_RD[r].double(), y_TD[t].double())
    return dots_TK


def check(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_gather_rows_equals_direct_indexing(shape, dtype):
    i = inputs(*shape, dtype)
    for scale_R in (None, i.scale_R):
        rows_RD = reference.gather_rows(i.x_TD, i.index_R, scale_R)
        check(rows_RD, direct_rows(i.x_TD, i.index_R, scale_R), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_gather_sum_equals_direct_indexing(shape, dtype):
    i = inputs(*shape, dtype)
    for weights_TK in (None, i.weights_TK):
        y_TD = reference.gather_sum(i.rows_RD, i.row_of_TK, weights_TK)
        check(y_TD, direct_sum(i.rows_RD, i.row_of_TK, weights_TK), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_gather_dot_equals_direct_indexing(shape, dtype):
    i = inputs(*shape, dtype)
    dots_TK = reference.gather_dot(i.rows_RD, i.row_of_TK, i.y_TD)
    check(dots_TK, direct_dot(i.rows_RD, i.row_of_TK, i.y_TD), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_gather_gradients_reads_gate_gradients_by_row(shape, dtype):
    i = inputs(*shape, dtype)
    values = [*i.rows_RD[:, 0].tolist(), 0.0]  # Index -1 selects the last value, which is 0.
    expected = [[values[r] for r in rows] for rows in i.row_of_TK.tolist()]
    _, got = reference.gather_gradients(i.rows_RD, i.row_of_TK, i.rows_RD[:, :1].t())
    assert got.dtype == dtype and got.shape == i.row_of_TK.shape and got.tolist() == expected


def test_a_row_with_index_minus_1_is_zero_even_if_the_input_is_nan():
    x_TD = torch.full((3, 2), float("nan"))
    hole_R = torch.tensor([-1, -1])
    assert torch.equal(reference.gather_rows(x_TD, hole_R), torch.zeros(2, 2))
    weights_TK = torch.ones(1, 2)
    assert torch.equal(reference.gather_sum(x_TD, hole_R.view(1, 2), weights_TK), torch.zeros(1, 2))
    dots_TK = reference.gather_dot(x_TD, hole_R.view(1, 2), torch.ones(1, 2))
    assert torch.equal(dots_TK, torch.zeros(1, 2))
    for gradient in reference.gather_gradients(x_TD, hole_R.view(1, 2), x_TD.t()):
        assert torch.equal(gradient, torch.zeros(1, 2))


def test_the_auto_backend_selects_the_reference_on_a_cpu_and_returns_the_reason():
    assert kernels.backend_for("auto", torch.device("cpu")) == ("reference", "tensors on cpu")
    assert kernels.ops("auto", torch.device("cpu")) is reference


def test_the_triton_backend_on_a_cpu_raises_a_one_sentence_error(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' but the tensors are on cpu; run on a GPU"):
        kernels.backend_for("triton", torch.device("cpu"))


def test_the_triton_backend_raises_a_one_sentence_error_if_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(kernels, "LACKING", "Triton is not installed")
    with pytest.raises(ValueError, match=r"Triton is not installed; install fairseq-tutel\[gpu\]"):
        kernels.backend_for("triton", torch.device("cuda"))
    backend, reason = kernels.backend_for("auto", torch.device("cuda"))
    assert backend == "reference" and reason.startswith("Triton is not installed; experts run one at a")
