"""Compare the output and all gradients of a variant with those of a loop over experts.

The loop gets the same rounded inputs and every token's experts. It runs in fp64 on a CPU and in fp32 on a
GPU, and shares no code with the variants.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs

REFERENCE_DTYPES = {"cpu": torch.float64, "cuda": torch.float32}
# Maximum relative error (of the norm), by dtype. A wrong result has an error of 0.1 or more.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Maximum error of gradients with relu: a hidden value near 0 may have another sign in another precision,
# which changes one row of a gradient completely.
CORNERS = 3e-3
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


def expected(case: Case, inputs: Inputs, capacity: int | None = None) -> dict[str, Tensor]:
    """Return the output y and the gradients dx, dgate, dfc1, … in the reference's precision.

    Args:
        case: the layer.
        inputs: inputs of the case.
        capacity: slots per expert, assigned to first choices and earlier tokens first; None: no limit.
    """
    dtype = REFERENCE_DTYPES[inputs.x_TD.device.type]
    x_TD, *_ = leaves = [
        tensor.detach().to(dtype).requires_grad_() for tensor in (inputs.x_TD, *inputs.weights.values())
    ]
    weights = dict(zip(inputs.weights, leaves[1:], strict=True))
    probs_TE = torch.softmax(F.linear(x_TD, weights["gate"]), dim=1)
    ids_TK = in_order(inputs.ids_TK, probs_TE)
    scale_TK = probs_TE.gather(1, ids_TK)
    if case.top_k > 1:
        scale_TK = scale_TK / scale_TK.sum(dim=1, keepdim=True)
    kept_TK = _kept(ids_TK, capacity)
    y_TD = torch.zeros_like(x_TD)
    for i in range(case.num_experts):
        token, choice = torch.where((ids_TK == i) & kept_TK)
        rows = x_TD[token]
        hidden = ACTIVATIONS[case.activation](rows @ weights["fc1"][i].t())
        if case.is_glu:
            hidden = hidden * (rows @ weights["fc3"][i].t())
        rows = hidden @ weights["fc2"][i].t() * scale_TK[token, choice].unsqueeze(1)
        y_TD = y_TD.index_add(0, token, rows)
    gradients = torch.autograd.grad(y_TD, leaves, inputs.dy_TD.to(dtype))
    names = ["dx", *(f"d{name}" for name in weights)]
    return {"y": y_TD.detach(), **dict(zip(names, gradients, strict=True))}


def in_order(ids_TK: Tensor, probs_TE: Tensor) -> Tensor:
    """Return every token's experts, sorted from the most to the least probable."""
    order_TK = probs_TE.detach().gather(1, ids_TK).argsort(dim=1, descending=True)
    return ids_TK.gather(1, order_TK)


def _kept(ids_TK: Tensor, capacity: int | None) -> Tensor:
    """Return [T, K] bool: which assignments get a slot."""
    if capacity is None:
        return torch.ones_like(ids_TK, dtype=torch.bool)
    ids_N = ids_TK.t().flatten()
    order_N = ids_N.argsort(stable=True)
    counts_E = torch.bincount(ids_N)
    first_N = (counts_E.cumsum(0) - counts_E)[ids_N[order_N]]
    place_N = torch.empty_like(ids_N)
    place_N[order_N] = torch.arange(len(ids_N), device=ids_N.device) - first_N
    return (place_N < capacity).view(ids_TK.shape[1], -1).t()


def relative_errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return, by name, the norm of the difference over the norm of the expected values.

    The error is infinite if a tensor is missing, is not finite, or has another shape.
    """
    errors = {}
    for name, expected_values in wanted.items():
        values = got.get(name)
        if values is None or values.shape != expected_values.shape:
            errors[name] = math.inf
            continue
        wanted_values = expected_values.double()
        difference = (values.double() - wanted_values).norm()
        error = float(difference / wanted_values.norm().clamp_min(1e-30))
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Return the maximum error of a tensor, which is "y", or "d" and the name of an input."""
    return TOLERANCES[dtype] if name == "y" else max(TOLERANCES[dtype], CORNERS)
