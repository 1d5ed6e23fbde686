"""The arguments of one forward of a layer, with tokens flattened. T tokens, D model_dim, S sentences."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.moe.capacity import Capacity, MicroBatch, capacity_of
from fairseq_tutel.moe.config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one forward, except the tokens. None does not override the configured value."""

    shape: tuple[int, ...]  # of x without D; T is its product
    time_first: bool = False  # x is [time, batch, D], as in fairseq: token t is (t // S, t % S)
    padding_T: Tensor | None = None  # bool, True for padding; None without padding
    token_ids_T: Tensor | None = None  # int64, for a hash gate
    capacity_factor: float | Capacity | None = None  # 0 drops nothing; a number or a whole rule
    top_k: int | None = None
    gate_index: int | None = None
    is_new: bool = True  # whether the forward is a new micro-batch, not a recomputation in backward

    @classmethod
    def of(
        cls,
        x: Tensor,
        model_dim: int,
        padding_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        time_first: bool = False,
        **overrides: Any,
    ) -> "Call":
        """Return the call of a layer for x; raise ValueError for wrong shapes or dtypes."""
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}; give tokens of a floating-point dtype.")
        if x.shape[-1:] != (model_dim,):
            raise ValueError(
                f"x has shape {tuple(x.shape)} but model_dim is {model_dim}; give tokens whose last "
                f"dimension is {model_dim}."
            )
        if time_first and x.dim() != 3:
            raise ValueError(
                f"x has shape {tuple(x.shape)} but time_first is True; give [time, batch, {model_dim}], or "
                "leave time_first out."
            )
        return cls(
            shape=tuple(x.shape[:-1]),
            time_first=time_first,
            padding_T=_flat(padding_mask, "padding_mask", torch.bool, x, time_first),
            token_ids_T=_flat(token_ids, "token_ids", torch.int64, x, time_first),
            **overrides,
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Return x as [T, D], with zeros for padding."""
        x_TD = x.reshape(-1, x.shape[-1])
        if self.padding_T is None:
            return x_TD
        # Attention gives NaN for a sentence of padding alone, and 0 * NaN is NaN in the gradient.
        return x_TD.masked_fill(self.padding_T.unsqueeze(1), 0.0)

    def micro_batch(self, config: MoEConfig, training: bool, bias_E: Tensor | None = None) -> MicroBatch:
        """Return the arguments of routing; raise ValueError for an invalid capacity factor."""
        return MicroBatch(
            top_k=self.top_k_of(config),
            capacity=capacity_of(config, training, self.capacity_factor),
            real_T=None if self.padding_T is None else ~self.padding_T,
            time_first=(self.shape[0], self.shape[1]) if self.time_first else None,
            training=training,
            bias_E=bias_E,
        )

    def top_k_of(self, config: MoEConfig) -> int:
        """Return the call's own top_k, or the configured one."""
        return config.top_k if self.top_k is None else self.top_k

    @property
    def sentences(self) -> tuple[int, int] | None:
        """(S, time) of the tokens; None for one token or a flat list, which is one sentence."""
        if self.time_first:
            return self.shape[1], self.shape[0]
        if len(self.shape) < 2:
            return None
        *outer, time = self.shape
        return math.prod(outer), time


def _flat(
    values: Tensor | None, name: str, dtype: torch.dtype, x: Tensor, time_first: bool
) -> Tensor | None:
    """Return one value per token [T], in the tokens' order."""
    if values is None:
        return None
    expected = (x.shape[1], x.shape[0]) if time_first else tuple(x.shape[:-1])
    if tuple(values.shape) != expected or values.dtype != dtype:
        meaning = ", True for padding" if dtype == torch.bool else ""
        raise ValueError(
            f"{name} is {values.dtype} of shape {tuple(values.shape)}; give {dtype} of shape "
            f"{expected}{meaning}."
        )
    return (values.t() if time_first else values).reshape(-1)
