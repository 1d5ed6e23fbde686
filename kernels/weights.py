"""The tensors of a stack of experts, by name, and what their feed-forward keeps and gives back.

D model_dim, H hidden_dim, E experts, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.large_pages import in_large_pages


@dataclass(frozen=True)
class Apart:
    """The tensors of n experts that do not lie in one stack: what kernels ask of a stack, expert by expert.

    For forwards without gradients alone.

    Attributes:
        make: returns the tensor of one.
        shape: of the stack that they would be, [n, ...].
        dtype: of them.
    """

    make: Callable[[int], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.shape[0]:
            raise IndexError
        return self.make(index)

    def unbind(self, dim: int) -> "Apart":
        """Return the tensors, each made when it is read."""
        assert dim == 0
        return self

    def to(self, dtype: torch.dtype) -> "Apart":
        """Return them in another dtype."""
        return Apart(lambda index: self.make(index).to(dtype), self.shape, dtype)


@dataclass(frozen=True)
class FFNWeights:
    """The maps of E experts, or of one without the first dimension; fc3 is of gated experts alone.

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
        """Whether the experts are gated."""
        return self.fc3_weight is not None

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> "FFNWeights":
        """Return the weights of tensors in the order of NAMES."""
        return cls(*tensors)

    def of_each(self) -> Any:
        """Return the same by name, each a list of every expert's tensor; None where there is none."""
        return FFNWeights.of([None if t is None else t.unbind(0) for t in self.tensors()])

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors in the order of NAMES."""
        return tuple(getattr(self, name) for name in NAMES)


NAMES = tuple(field.name for field in fields(FFNWeights))


@dataclass(frozen=True)
class Kept:
    """What backward needs of forward beside its input.

    Attributes:
        a_RH: [R, H] what the activation gave, where its derivative is taken from that; else None.
        h_RH: [R, H] what it was given, else.
        g_RH: [R, H] what it is multiplied with in gated experts.
    """

    a_RH: Tensor | None = None
    h_RH: Tensor | None = None
    g_RH: Tensor | None = None


@dataclass(frozen=True)
class FFNGradients:
    """Gradients of one feed-forward.

    Attributes:
        x_RD: [R, D] of what every row read; None if it is not needed. Its tail is 0.
        gate_R: [R] of the gates; None without. Its tail is not to be read.
        weights: of every map; None where none is needed.
    """

    x_RD: Tensor | None
    gate_R: Tensor | None
    weights: FFNWeights | None

    @classmethod
    def empty_like(
        cls,
        weights: FFNWeights,
        num_rows: int,
        gate_R: Tensor | None,
        needs_dx: bool,
        needs_weights: bool,
    ) -> "FFNGradients":
        """Return gradients that are still to be written."""
        w1 = weights.fc1_weight
        return cls(
            w1.new_empty(num_rows, w1.shape[2]) if needs_dx else None,
            None if gate_R is None else torch.empty_like(gate_R),
            FFNWeights.of(
                [
                    None if t is None else in_large_pages(torch.empty_like(t))
                    for t in weights.tensors()
                ]
            )
            if needs_weights
            else None,
        )
