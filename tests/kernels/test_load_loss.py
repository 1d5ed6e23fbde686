"""The tests compare the kernel of the GShard loss with the reference and with finite differences."""

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
