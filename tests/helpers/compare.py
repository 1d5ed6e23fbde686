"""Compares the outputs and gradients of two implementations of the same function."""

from collections.abc import Callable

import torch
from torch import Tensor

# The largest allowed error for values of about 1; fp16 has 11 significant bits, and bf16 has 8.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def close(got: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> None:
    """Assert that two tensors agree to `tolerance` (default: by dtype); `what` names them in errors."""
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def gradients(loss: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of the loss for each named tensor, with zeros for unused tensors."""
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), grads, strict=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}


def same_function(
    ours: Callable[[], Tensor],
    oracle: Callable[[], Tensor],
    named: dict[str, Tensor],
    tolerance: float | None = None,
) -> None:
    """Compare the outputs of two functions, and the outputs' gradients for the tensors in `named`."""
    y, expected = ours(), oracle()
    close(y, expected, "output", tolerance)
    generator = torch.Generator().manual_seed(7)
    projection = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    got_grads = gradients((y.double() * projection).sum(), named)
    expected_grads = gradients((expected.double() * projection).sum(), named)
    for name, expected_grad in expected_grads.items():
        close(got_grads[name], expected_grad, f"gradient of {name}", tolerance)


def saved_for_backward(function: Callable[[], object]) -> list[Tensor]:
    """Return the tensors that autograd saves while `function` runs."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept
