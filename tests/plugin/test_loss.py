"""The distillation loss and its gradient equal those of torch's KL divergence of probabilities."""

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, close, saved_for_backward
from torch import Tensor

from fairseq_tutel.kernels import row_chunks
from fairseq_tutel.plugin.criterions.distillation_loss import distillation_loss

V = 9


def case(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    tables = 3 * torch.randn(2, num_rows, V, generator=generator, dtype=torch.float64)
    counts = torch.arange(num_rows) % 4 != 0
    return tables[0].to(dtype).requires_grad_(), tables[1].to(dtype), counts


def by_table(student: Tensor, teacher: Tensor, counts: Tensor, T: float) -> Tensor:
    """Return T² KL(teacher || student), computed by torch from all probabilities."""
    wide = torch.promote_types(student.dtype, torch.float32)
    q, p = (torch.softmax(table[counts].to(wide) / T, dim=1) for table in (student, teacher))
    return T**2 * F.kl_div(q.log(), p, reduction="sum")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", (1.0, 2.5))
@pytest.mark.parametrize("num_rows, elements", [(11, 10**6), (11, 30), (2, 3), (0, 30)])
def test_distillation_loss_and_gradient_equal_those_of_torch(monkeypatch, num_rows, elements, T, dtype):
    monkeypatch.setitem(row_chunks.ELEMENTS, "cpu", elements)
    student, teacher, counts = case(num_rows, dtype)
    expected = by_table(student, teacher, counts, T)
    (expected_grad,) = torch.autograd.grad(3 * expected, student)
    with torch.no_grad():
        student[~counts] = torch.nan
    loss = distillation_loss(student, teacher, counts, T)
    (grad,) = torch.autograd.grad(3 * loss, student)
    assert loss.dtype == expected.dtype and grad.dtype == dtype
    close(loss, expected, "loss")
    close(grad, expected_grad, "gradient")


def test_the_gradient_of_the_distillation_loss_equals_finite_differences():
    student, teacher, counts = case(6, torch.float64)
    assert torch.autograd.gradcheck(lambda x: distillation_loss(x, teacher, counts, 2.0), student)


def test_backward_saves_only_the_logits_of_student_and_teacher():
    student, teacher, counts = case(50, torch.bfloat16)
    kept = saved_for_backward(lambda: distillation_loss(student, teacher, counts, 1.0))
    tables = {t.data_ptr() for t in kept if t.numel() >= student.numel()}
    assert tables == {student.data_ptr(), teacher.data_ptr()}
