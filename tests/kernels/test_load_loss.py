"""The tests compare sums over tokens, and the GShard loss, with the reference ops and with formulas."""

import math

import pytest
import torch

from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference

pytest.importorskip("triton")


def compare(device: str) -> None:
    ops = kernels.ops("triton", torch.device(device))
    generator = torch.Generator().manual_seed(1)
    for num_experts, tokens in ((1, 3), (5, 0), (8, 100), (130, 9)):
        for dtype in (torch.float32, torch.float64):
            mass_E = torch.rand(num_experts, generator=generator, dtype=dtype).to(device)
            load_E = torch.randint(0, tokens + 1, (num_experts,), generator=generator).to(device)
            arguments = mass_E, load_E, torch.tensor(tokens, device=device)
            got, expected = ops.load_loss(*arguments), reference.load_loss(*arguments)
            assert all(t.dtype == dtype for t in got)
            torch.testing.assert_close(got, expected)


def compare_sums(device: str) -> None:
    ops, generator = kernels.ops("triton", torch.device(device)), torch.Generator().manual_seed(1)
    # In the largest case, a Triton program computes several blocks of tokens.
    for num_tokens, num_experts, top_k in ((0, 3, 1), (1, 1, 1), (300, 5, 5), (70, 130, 3), (9000, 16, 2)):
        probs_TE = torch.rand(num_tokens, num_experts, generator=generator).softmax(dim=1)
        probs_TE[: num_tokens // 2, 0] = 0.0
        weights_TK, real_T = probs_TE[:, :top_k], torch.rand(num_tokens, generator=generator) < 0.7
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for real in (None, real_T.to(device)):
                arguments = probs_TE.to(device, dtype), weights_TK.to(device, dtype), real
                torch.testing.assert_close(ops.token_sums(*arguments), reference.token_sums(*arguments))


def check_reference_sums() -> None:
    probs_TE = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.1, 0.2, 0.7]], dtype=torch.float64)
    weights_TK, real_T = (
        torch.tensor([[0.5, 0.5], [0.5, 0.25], [0.7, 0.2]]),
        torch.tensor([True, True, False]),
    )
    entropies = -sum(p * math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.5))
    got = reference.token_sums(probs_TE, weights_TK, real_T)
    assert got.tolist() == pytest.approx([0.75, 0.75, 0.5, entropies, 1.0, 0.75])


def test_the_reference_sums_over_tokens_equal_their_formulas():
    check_reference_sums()


def test_the_interpreted_sums_over_tokens_equal_the_reference(interpreter):
    interpreter.run(compare_sums, "cpu")


@pytest.mark.gpu
def test_the_compiled_sums_over_tokens_equal_the_reference():
    compare_sums("cuda")


def check_reference() -> None:
    mass_E = torch.rand(6, dtype=torch.float64).requires_grad_()
    load_E, tokens = torch.tensor([3, 0, 1, 2, 5, 1]), torch.tensor(12)
    loss, gradient_E = reference.load_loss(mass_E, load_E, tokens)
    plain = 6 * sum(float(n) / 12 * m for n, m in zip(load_E, mass_E.tolist(), strict=True)) / 12
    assert loss.item() == pytest.approx(plain)
    torch.testing.assert_close(torch.autograd.grad(loss, mass_E)[0], gradient_E.detach())


def test_the_reference_gshard_loss_equals_its_formula():
    check_reference()


def test_the_interpreted_gshard_loss_equals_the_reference(interpreter):
    interpreter.run(compare, "cpu")


@pytest.mark.gpu
def test_the_compiled_gshard_loss_equals_the_reference():
    compare("cuda")
