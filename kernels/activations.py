"""The experts' activation functions and derivatives in plain torch, with fairseq's names.

The input of an activation is h, and its output is a. If the derivative can be computed from a alone, only a
is saved for backward. fairseq's gelu_fast and gelu_accurate both are the tanh approximation of GELU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function with its derivative.

    Attributes:
        forward: computes a from h, and overwrites h if `keeps_output` is set.
        backward: computes the gradient dh from the gradient da and the saved tensor; may overwrite da.
        keeps_output: whether a is saved for backward; otherwise h is saved.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    keeps_output: bool = False


def _relu_backward(da: Tensor, a: Tensor) -> Tensor:
    # On a CPU, masked_fill_ is 20 times slower than threshold_backward.
    return aten.threshold_backward.grad_input(da, a, 0, grad_input=da)


def _gelu(approximate: str) -> Activation:
    return Activation(
        lambda h: F.gelu(h, approximate=approximate),
        lambda da, h: aten.gelu_backward(da, h, approximate=approximate),
    )


ACTIVATIONS = {
    "relu": Activation(F.relu_, _relu_backward, keeps_output=True),
    "relu_squared": Activation(lambda h: F.relu(h).square(), lambda da, h: da.mul_(F.relu(h)).mul_(2)),
    "gelu": _gelu("none"),
    "gelu_fast": _gelu("tanh"),
    "gelu_accurate": _gelu("tanh"),
    "tanh": Activation(torch.tanh_, aten.tanh_backward.default, keeps_output=True),
    "linear": Activation(lambda h: h, lambda da, a: da, keeps_output=True),
    "swish": Activation(F.silu, aten.silu_backward.default),
}
