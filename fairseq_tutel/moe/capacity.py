"""Capacity: how many places an expert has in one micro-batch.

T tokens, E experts, K top_k.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairseq_tutel.moe.config import CAPACITY, MoEConfig, is_number


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The rule of one forward.

    Attributes:
        factor: f > 0: K * ceil(f * T / E) places; 0: no limit; f < 0: as |f| (how much of it is needed
            only sizes buffers).
        token_fraction: above 0, ceil(token_fraction * T) places, whatever the factor.
        minimum: places at least, where there is a limit.
        multiple: a limit is rounded up to a multiple of this.
        fixed: above 0, so many places, whatever the rest.
    """

    factor: float = 0.0
    token_fraction: float = 0.0
    minimum: int = 0
    multiple: int = 1
    fixed: int = 0

    @property
    def is_limited(self) -> bool:
        """Whether anything can be dropped."""
        return self.factor != 0 or self.token_fraction > 0 or self.fixed > 0

    def places(self, top_k: int, num_experts: int, num_tokens: Tensor) -> Tensor:
        """Return the places per expert, an int64 scalar on the device of `num_tokens`.

        Args:
            top_k: K.
            num_experts: E.
            num_tokens: [] int64, the real tokens; left on the device, so that nobody waits for it.
        """
        if self.fixed > 0:
            return num_tokens.new_full((), self.fixed)
        tokens = num_tokens.double()
        if self.token_fraction > 0:
            limit = (tokens * self.token_fraction).ceil().long()
        else:
            limit = (tokens * abs(self.factor) / num_experts).ceil().long() * top_k
        return self._rounded(limit.clamp_min(self.minimum))

    def most_places(self, top_k: int, num_experts: int, num_tokens: int) -> int:
        """Return a number on the host that `places` of at most `num_tokens` never exceeds."""
        if self.fixed > 0:
            return self.fixed
        per_token = self.token_fraction or top_k * abs(self.factor) / num_experts
        limit = max(int(per_token * num_tokens) + top_k + 1, self.minimum)
        return self._rounded(limit)

    def _rounded(self, limit: Any) -> Any:
        return (limit + self.multiple - 1) // self.multiple * self.multiple


def evaluates_as_in_training(config: MoEConfig) -> bool:
    """Whether evaluation has the training's capacity: where asked for, or where experts choose."""
    asked = config.eval_capacity_token_fraction
    unset = asked == 0 and config.eval_capacity_factor == 0
    return asked < 0 or (config.choice == "experts" and unset)


def capacity_of(
    config: MoEConfig, training: bool, factor: float | Capacity | None = None
) -> Capacity:
    """Return the rule of a forward.

    Args:
        config: the layer's.
        training: evaluation has a capacity of its own, no limit by default.
        factor: of this call alone, instead of the configured rule; or the whole rule.

    Raises:
        ValueError: `factor` is no number that a capacity could have.
    """
    if isinstance(factor, Capacity):
        return factor
    fraction = 0.0
    if factor is not None and not (is_number(factor) and CAPACITY[0](factor)):
        raise ValueError(f"capacity_factor is {factor!r}; {CAPACITY[1]}.")
    if factor is None:
        fraction = 0.0 if training else config.eval_capacity_token_fraction
        as_in_training = training or evaluates_as_in_training(config)
        factor = config.capacity_factor if as_in_training else config.eval_capacity_factor
    return Capacity(
        factor=float(factor),
        token_fraction=max(fraction, 0.0),
        minimum=config.min_capacity,
        multiple=config.capacity_multiple,
    )
