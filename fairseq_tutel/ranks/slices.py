"""Parts and slices: which experts a rank holds, and, where one has several ranks, which part of it.

E experts (e local), s slices of an expert. Slices of one expert are on consecutive ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slice:
    """How a stacked tensor [e, ...] is cut: into `count` parts along `dim`."""

    count: int = 1
    dim: int = 0


@dataclass(frozen=True)
class Part:
    """Which of a layer's experts a rank holds.

    Attributes:
        num_local: e, whole or in slices.
        first: global id of the first of them.
        slices: s, ranks that hold one expert, a part of its hidden dimension each.
        index: which of these parts is here.
    """

    num_local: int
    first: int = 0
    slices: int = 1
    index: int = 0

    def of(self, num_experts: int) -> str:
        """Return in words which of so many experts these are."""
        last = self.first + self.num_local - 1
        which = f"expert {last}" if self.num_local == 1 else f"experts {self.first} to {last}"
        cut = f" in slice {self.index} of {self.slices}" if self.slices > 1 else ""
        return f"{which} of {num_experts}{cut}"


def mark_slice(parameter: nn.Parameter, how: Slice) -> None:
    """Let a parameter say how it is cut, and the fp32 copy that fairseq makes of it too."""
    # The one attribute that fairseq copies with its value; it reads it in its composite optimizer
    # alone, which experts on several ranks refuse.
    parameter.param_group = how  # type: ignore[attr-defined]


def slice_of(parameter: Tensor) -> Slice:
    """Return what `mark_slice` said of a parameter; one whole part where it was not called."""
    how = getattr(parameter, "param_group", None)
    return how if isinstance(how, Slice) else Slice()


def join(parts: Sequence[Tensor], how: Slice) -> Tensor:
    """Put the parts of consecutive ranks together: slices of an expert first, then the experts."""
    n = how.count
    if n > 1:
        parts = [torch.cat(list(parts[i : i + n]), how.dim) for i in range(0, len(parts), n)]
    return torch.cat(list(parts))


def cut(whole: Tensor, how: Slice, index: int) -> Tensor:
    """Return part `index` of a tensor whose `dim` is whole; a view."""
    width = whole.shape[how.dim] // how.count
    return whole.narrow(how.dim, index * width, width)
