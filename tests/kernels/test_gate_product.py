"""Tests the gate's matrix product of bf16 operands, with fp32 results and 16-bit gradients.

On a GPU (`-m gpu`), the product of the compiled kernel is compared with fp64.
"""

import pytest
import torch
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels import gate_product

SHAPES = ((0, 8, 3), (1, 8, 1), (1, 5, 8), (33, 40, 8), (200, 64, 100))


def operands(tokens: int, model_dim: int, experts: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    drawn = [torch.randn(n, model_dim, generator=generator) for n in (tokens, experts)]
    return [t.bfloat16().to(device).requires_grad_() for t in drawn]


def softmax_gradient(logits_TE: Tensor) -> Tensor:
    """Return a gradient whose sum over the experts is 0, like a gradient through a softmax."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(logits_TE.shape, generator=generator)
    return (drawn - drawn.mean(dim=1, keepdim=True)).to(logits_TE.device)


def compare(device: str) -> None:
    for shape in SHAPES:
        x_TD, weight_ED = operands(*shape, device)
        with torch.no_grad():
            weight_ED += 20  # adding 20 does not change the exact gradient of x
        logits_TE = gate_product.product(x_TD, weight_ED)
        assert logits_TE.dtype == torch.float32
        wide = [t.detach().double().requires_grad_() for t in (x_TD, weight_ED)]
        expected_TE = wide[0] @ wide[1].t()
        torch.testing.assert_close(logits_TE.double(), expected_TE, rtol=1e-5, atol=1e-4)
        dlogits_TE = softmax_gradient(logits_TE)
        got = torch.autograd.grad(logits_TE, (x_TD, weight_ED), dlogits_TE)
        exact = torch.autograd.grad(expected_TE, wide, dlogits_TE.double())
        for grad, other in zip(got, exact, strict=True):
            assert grad.dtype == torch.bfloat16
            # rtol is half a unit of bf16, and atol allows for rounded gradients times weights of about 20.
            torch.testing.assert_close(grad.double(), other, rtol=2**-8, atol=2e-2)


def test_the_logits_and_gradients_of_the_gate_product_equal_fp64():
    compare("cpu")


def test_a_nonfinite_gradient_stays_nonfinite_for_its_token_and_expert():
    """Only the gradients of the token and the expert with the infinite or NaN value are not finite."""
    x_TD, weight_ED = operands(6, 8, 4, "cpu")
    for value in (float("inf"), float("-inf"), float("nan")):
        dlogits_TE = torch.ones(6, 4)
        dlogits_TE[2, 1] = value
        grads = torch.autograd.grad(gate_product.product(x_TD, weight_ED), (x_TD, weight_ED), dlogits_TE)
        for grad, place in zip(grads, (2, 1), strict=True):
            expected = torch.arange(len(grad)) != place
            assert torch.equal(grad.isfinite(), expected.unsqueeze(1).expand_as(grad))


@pytest.mark.parametrize(
    "options, needs_dx",
    [({"top_k": 2}, True), ({"top_k": 1, "balance_loss": "z:1"}, True), ({"gate_noise": 1.0}, True),
     ({"shared_experts": 1, "residual": True}, True), ({"input_jitter": 0.1}, True), ({}, False)],
)  # fmt: skip
def test_a_layer_trains_equally_with_the_bf16_product_and_with_fp32_copies(options, needs_dx, interpreter):
    interpreter.run(compare_layers, options, needs_dx)


def compare_layers(options: dict, needs_dx: bool) -> None:
    """Train a layer with the bf16 gate product and with a product of fp32 copies; compare the results."""
    results = []
    for is_new in (True, False):
        gate_product.is_supported = lambda x, w, is_new=is_new: is_new and x.dtype == torch.bfloat16
        config = MoEConfig(model_dim=16, hidden_dim=8, num_experts=4, backend="triton", **options)
        torch.manual_seed(3)
        layer = MoELayer(config, seed=1).bfloat16()
        x = operands(30, 16, 1, "cpu")[0].detach().requires_grad_(needs_dx)
        y, output = layer(x)
        (y.float().square().sum() + output.balance_loss).backward()
        results.append([t for t in (y.detach(), x.grad, layer.gate.weight.grad) if t is not None])
    for got, expected in zip(*results, strict=True):  # up to one bf16 unit of the largest value
        torch.testing.assert_close(got, expected, rtol=0.016, atol=float(expected.abs().max()) * 2**-8)


@pytest.mark.gpu
def test_the_compiled_gate_product_equals_fp64_in_logits_and_gradients():
    compare("cuda")
    assert gate_product.is_supported(*operands(2, 8, 4, "cuda"))
