"""The arguments of one forward pass of a MoE layer. T tokens, D model_dim, S sentences."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.slots import Capacity, MicroBatch, capacity_of


@dataclass(eq=False, kw_only=True)
class Call:
    """The arguments of one forward pass of a MoE layer, except the tokens."""

    shape: tuple[int, ...]  # shape of x without D; T is the product of these sizes
    time_first: bool = False  # whether x is [time, S, D], so that token t is step t // S of sentence t % S
    padding_T: Tensor | None = None  # bool, True for padding; None if there is no padding
    # If the next three are not None, they replace the configured values.
    capacity_factor: float | Capacity | None = None
    top_k: int | None = None
    gate_index: int | None = None
    is_new: bool = True  # False if the forward pass is a recomputation during backward

    @classmethod
    def of(
        cls,
        x: Tensor,
        model_dim: int,
        padding_mask: Tensor | None = None,
        time_first: bool = False,
        **overrides: Any,
    ) -> "Call":
        """Check the arguments of a forward pass and return them as a Call, or raise ValueError."""
        *shape, width = x.shape or (0,)
        if width != model_dim or (time_first and len(shape) != 2):
            expected = f"[{'time, batch' if time_first else '...'}, {model_dim}]"
            raise ValueError(
                f"x has shape {tuple(x.shape)}; give {expected}, where {model_dim} is model_dim."
            )
        return cls(
            shape=tuple(shape),
            time_first=time_first,
            padding_T=None if padding_mask is None else _flat(padding_mask, x, time_first),
            **overrides,
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Return the layer's input x as a matrix [T, D] of tokens, with padding tokens set to zero."""
        x_TD = x.reshape(-1, x.shape[-1])
        if self.padding_T is None:
            return x_TD
        # For a sentence of only padding, attention returns NaN, and in the gradient, 0 * NaN would be NaN.
        return x_TD.masked_fill(self.padding_T.unsqueeze(1), 0.0)

    def micro_batch(self, config: MoEConfig, training: bool, bias_E: Tensor | None = None) -> MicroBatch:
        """Return the routing arguments of this call; raise ValueError for an invalid capacity factor."""
        sentences, _ = self.sentences or (1, 1)
        return MicroBatch(
            top_k=config.top_k if self.top_k is None else self.top_k,
            capacity=capacity_of(config, training, self.capacity_factor, sentences),
            real_T=None if self.padding_T is None else ~self.padding_T,
            time_first=(self.shape[0], self.shape[1]) if self.time_first else None,
            training=training,
            bias_E=bias_E,
        )

    @property
    def sentences(self) -> tuple[int, int] | None:
        """The numbers of sentences and time steps; None if x is one token or a list of tokens."""
        if self.time_first:
            return self.shape[1], self.shape[0]
        if len(self.shape) < 2:
            return None
        *outer, time = self.shape
        return math.prod(outer), time


def _flat(padding_mask: Tensor, x: Tensor, time_first: bool) -> Tensor:
    """Flatten a padding mask to [T], in the order of the tokens."""
    expected = (x.shape[1], x.shape[0]) if time_first else tuple(x.shape[:-1])
    if tuple(padding_mask.shape) != expected or padding_mask.dtype != torch.bool:
        raise ValueError(
            f"padding_mask has dtype {padding_mask.dtype} and shape {tuple(padding_mask.shape)}; give "
            f"dtype {torch.bool} and shape {expected}, True for padding."
        )
    return (padding_mask.t() if time_first else padding_mask).reshape(-1)
