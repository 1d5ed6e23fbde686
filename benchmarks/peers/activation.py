"""The activation of an expert, between its matrix products."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


def activate(case: Case, hidden: Tensor, beside: Tensor | None) -> Tensor:
    """Return the activation of x W1, and for swiglu silu(x W1) * (x W3), given both products."""
    if case.is_glu:
        return F.silu(hidden) * beside
    return ACTIVATIONS[case.activation](hidden)
