"""The KL term against torch's over whole tables, and its gradient."""

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, close, saved_for_backward
from torch import Tensor

from fairseq_tutel.distillation.loss import Answers, distillation_loss, top_answers
from fairseq_tutel.kernels import row_chunks

V = 9


def case(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    tables = 3 * torch.randn(2, num_rows, V, generator=generator, dtype=torch.float64)
    counts = torch.arange(num_rows) % 4 != 0
    return tables[0].to(dtype).requires_grad_(), tables[1].to(dtype), counts


def by_table(student: Tensor, teacher: Tensor, counts: Tensor, T: float, top_k: int = V) -> Tensor:
    """T² KL by torch, of the K likeliest words and one that stands for the rest."""
    wide = torch.promote_types(student.dtype, torch.float32)
    q, p = (torch.softmax(table[counts].to(wide) / T, dim=1) for table in (student, teacher))
    order = p.argsort(dim=1, descending=True)
    q, p = q.gather(1, order), p.gather(1, order)
    if top_k < V:
        p, q = (torch.cat([t[:, :top_k], t[:, top_k:].sum(1, True)], dim=1) for t in (p, q))
    return T**2 * F.kl_div(q.log(), p, reduction="sum")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", (1.0, 2.5))
@pytest.mark.parametrize("num_rows, elements", [(11, 10**6), (11, 30), (2, 3), (0, 30)])
@pytest.mark.parametrize("top_k", (0, 3, V))
def test_loss_and_gradient_are_those_of_the_table(monkeypatch, num_rows, elements, top_k, T, dtype):
    monkeypatch.setitem(row_chunks.ELEMENTS, "cpu", elements)
    student, teacher, counts = case(num_rows, dtype)
    expected = by_table(student, teacher, counts, T, top_k or V)
    (expected_grad,) = torch.autograd.grad(3 * expected, student)
    given = top_answers(teacher, top_k, T) if top_k else teacher
    with torch.no_grad():
        student[~counts] = torch.nan
    loss = distillation_loss(student, given, counts, T)
    (grad,) = torch.autograd.grad(3 * loss, student)
    assert loss.dtype == expected.dtype and grad.dtype == dtype
    close(loss, expected, "loss")
    close(grad, expected_grad, "gradient")


@pytest.mark.parametrize("top_k", (0, 1, 3, V))
def test_the_gradient_is_that_of_finite_differences(top_k):
    student, teacher, counts = case(6, torch.float64)
    given = top_answers(teacher, top_k, 2.0) if top_k else teacher
    assert torch.autograd.gradcheck(lambda x: distillation_loss(x, given, counts, 2.0), student)


@pytest.mark.parametrize("top_k", (V, V + 3))
def test_all_words_and_the_likeliest_of_all_are_the_same_number(top_k):
    student, teacher, counts = case(8, torch.float64)
    answers = top_answers(teacher, top_k, 1.0)
    assert answers.words_NK.shape == answers.logs_NK.shape == (8, V)
    of_all, of_likeliest = (
        distillation_loss(student, given, counts, 1.0).item() for given in (teacher, answers)
    )
    assert of_likeliest == pytest.approx(of_all, rel=1e-12)


@pytest.mark.parametrize("log", (0.0, 1e-6))
def test_a_teacher_that_is_sure_gives_finite_numbers(log):
    """Rounding can make its probabilities sum to more than 1."""
    student, _, counts = case(4, torch.float32)
    sure = Answers(torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), log))
    with torch.no_grad():
        student[:, 0] += 200.0
    loss = distillation_loss(student, sure, counts, 1.0)
    (grad,) = torch.autograd.grad(loss, student)
    assert loss.isfinite() and grad.isfinite().all()


def test_nothing_is_kept_but_the_two_tables():
    student, teacher, counts = case(50, torch.bfloat16)
    kept = saved_for_backward(lambda: distillation_loss(student, teacher, counts, 1.0))
    tables = {t.data_ptr() for t in kept if t.numel() >= student.numel()}
    assert tables == {student.data_ptr(), teacher.data_ptr()}
