"""`token_loss` and its gradient equal fairseq's formula on a table of log-probabilities."""

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, close, saved_for_backward
from torch import Tensor

from fairseq_tutel.kernels import row_chunks
from fairseq_tutel.plugin.criterions.token_loss import token_loss

IGNORED = 1


def by_table(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logs_NV = F.log_softmax(logits_NV, dim=1, dtype=wide)
    kept = target_N != IGNORED
    nll = -logs_NV.gather(1, target_N.unsqueeze(1)).squeeze(1)[kept].sum()
    each = smoothing / (logits_NV.shape[1] - 1)
    spread = -logs_NV.sum(dim=1)[kept].sum()
    return (1 - smoothing - each) * nll + each * spread, nll


def case(num_rows: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    logits = 3 * torch.randn(num_rows, words, generator=generator, dtype=torch.float64)
    target = torch.randint(words, (num_rows,), generator=generator)
    target[::4] = IGNORED
    return logits.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("num_rows, elements", [(11, 10**6), (11, 30), (11, 3), (1, 30), (0, 30)])
def test_loss_and_gradient_equal_those_from_a_table(monkeypatch, num_rows, elements, smoothing, dtype):
    monkeypatch.setitem(row_chunks.ELEMENTS, "cpu", elements)
    logits, target = case(num_rows, 9, dtype)
    results = []
    for function in (
        lambda: token_loss(logits, target, smoothing, IGNORED),
        lambda: by_table(logits, target, smoothing),
    ):
        logits.grad = None
        loss, nll = function()
        (2 * loss).backward()
        results.append((loss, nll, logits.grad))
    for name, got, expected in zip(("loss", "nll", "gradient"), *results, strict=True):
        assert got.dtype == expected.dtype, name
        close(got, expected, name)


def test_the_gradient_equals_finite_differences():
    logits, target = case(6, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_loss(x, target, 0.2, IGNORED)[0], logits)


def test_backward_saves_only_the_logits():
    logits, target = case(50, 40, torch.bfloat16)
    kept = saved_for_backward(lambda: token_loss(logits, target, 0.1, IGNORED))
    assert [t.data_ptr() for t in kept if t.numel() >= logits.numel()] == [logits.data_ptr()]
