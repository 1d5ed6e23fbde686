"""The weights of stacked experts, their gradients, and the activations that the FFN saves for backward.

D model_dim, H hidden_dim, E experts, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertTensorList:
    """A list of n experts' tensors that kernels can use like a stacked tensor [n, ...].

    Such a list supports only forward passes without gradients.

    Attributes:
        make: returns the tensor of one expert.
        shape: the shape of the stacked tensor, [n, ...].
        dtype: the dtype of the tensors.
    """

    make: Callable[[int], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.shape[0]:
            raise IndexError
        return self.make(index)

    def unbind(self, dim: int) -> "ExpertTensorList":
        """Return this list, in which an expert's tensor is created when it is read."""
        assert dim == 0
        return self

    def to(self, dtype: torch.dtype) -> "ExpertTensorList":
        """Return the list of experts' tensors, converted to another dtype when they are read."""
        return ExpertTensorList(lambda index: self.make(index).to(dtype), self.shape, dtype)


class FFNWeights(NamedTuple):
    """The FFN weights of E stacked experts, or of one expert; only gated experts have fc3.

    Attributes:
        fc1_weight: [E, H, D].
        fc1_bias: [E, H] or None.
        fc2_weight: [E, D, H].
        fc2_bias: [E, D] or None.
        fc3_weight: [E, H, D] or None.
        fc3_bias: [E, H] or None.
    """

    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    fc3_weight: Tensor | None = None
    fc3_bias: Tensor | None = None

    @property
    def is_glu(self) -> bool:
        """Whether the experts are gated, that is, have fc3."""
        return self.fc3_weight is not None

    def of_each(self) -> Any:
        """Return the FFN weights with each stacked tensor split into one tensor per expert."""
        return FFNWeights._make(None if t is None else t.unbind(0) for t in self)


NAMES = FFNWeights._fields


class SavedActivations(NamedTuple):
    """The activations that the FFN's forward saves for backward, without the FFN's input.

    Attributes:
        a_RH: [R, H] the activation function's output, if backward needs only the output; else None.
        h_RH: [R, H] the activation function's input, if backward needs it; else None.
        g_RH: [R, H] fc3's output in gated experts, which is multiplied with the activation; else None.
    """

    a_RH: Tensor | None = None
    h_RH: Tensor | None = None
    g_RH: Tensor | None = None


class FFNGradients(NamedTuple):
    """The gradients of the inputs, gate weights and expert weights of the experts' FFNs.

    Attributes:
        x_RD: [R, D] the gradient of every row's input, 0 after the last group; None if not needed.
        gate_PR: [P, R] P parts whose sum is the gradient of each row's gate weight, undefined after the
            last group; None without gates.
        weights: the gradients of the weights; None if they are not needed.
    """

    x_RD: Tensor | None
    gate_PR: Tensor | None
    weights: FFNWeights | None

    @classmethod
    def empty_like(
        cls, weights: FFNWeights, num_rows: int, gate_R: Tensor | None, needs_dx: bool, needs_weights: bool
    ) -> "FFNGradients":
        """Allocate uninitialized gradient tensors with the shapes of the given FFN weights."""
        w1 = weights.fc1_weight
        return cls(
            w1.new_empty(num_rows, w1.shape[2]) if needs_dx else None,
            None if gate_R is None else torch.empty_like(gate_R).unsqueeze(0),
            FFNWeights._make(None if t is None else torch.empty_like(t) for t in weights)
            if needs_weights
            else None,
        )
