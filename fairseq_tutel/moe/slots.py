"""Capacity and drop policies: how many slots an expert has, and in which order assignments get slots.

T is the number of tokens, E the number of experts, K is top_k, and N = K * T is the number of assignments.
Index j * T + t is choice j of token t. Assignments get slots in the order of the drop policy. Assignments
beyond the capacity are dropped. The kernel `assign_rows` numbers each expert's assignments in this order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.reference_route import Rows
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.option import CAPACITY, is_number


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The rule that gives each expert's capacity (its number of slots) in a forward pass."""

    # A factor f > 0 gives K * ceil(f * T / E) slots, and 0 gives no limit. A factor f < 0 gives the same
    # slots as -f, but buffers are no larger than the busiest expert needs.
    factor: float = 0.0
    token_fraction: float = 0.0  # above 0: ceil(token_fraction * T) slots; replaces the factor
    tokens: int = 0  # above 0: replaces T, the number of real tokens, in the token_fraction rule
    minimum: int = 0  # the smallest number of slots
    multiple: int = 1  # the number of slots is rounded up to a multiple of this number

    @property
    def is_limited(self) -> bool:
        """Whether the number of slots is limited, so that assignments can be dropped."""
        return self.factor != 0 or self.token_fraction > 0

    def slots(self, top_k: int, num_experts: int, num_tokens: Tensor) -> Tensor:
        """Return the number of slots per expert, an int64 scalar on the device of `num_tokens`.

        The number is computed in double precision and rounded up. For example, 200 tokens, 4 experts, K = 1
        and the factor 1.1 give 56 slots, because the computed 200 * 1.1 / 4 is slightly more than 55.
        """
        tokens = num_tokens.double()
        if self.token_fraction > 0:
            tokens = torch.full_like(tokens, self.tokens) if self.tokens else tokens
            limit = (tokens * self.token_fraction).ceil().long()
        else:
            limit = (tokens * abs(self.factor) / num_experts).ceil().long() * top_k
        return self._rounded(limit.clamp_min(self.minimum))

    def most_slots(self, top_k: int, num_experts: int, num_tokens: int) -> int:
        """Return an upper bound of the slots per expert for `num_tokens` tokens, without a device read."""
        if self.token_fraction > 0:
            num_tokens = self.tokens or num_tokens
        per_token = self.token_fraction or top_k * abs(self.factor) / num_experts
        limit = max(int(per_token * num_tokens) + top_k + 1, self.minimum)
        return self._rounded(limit)

    def _rounded(self, limit: Any) -> Any:
        return (limit + self.multiple - 1) // self.multiple * self.multiple


@dataclass(eq=False, kw_only=True)
class MicroBatch:
    """The arguments of routing for one micro-batch, except the gate's logits and the layer's options."""

    top_k: int
    capacity: Capacity = Capacity()
    real_T: Tensor | None = None  # Bool, False for padding. None means no padding.
    # The pair (time, batch) if token t is at (t // batch, t % batch), as in fairseq. Slots are assigned in
    # (sentence, time) order with and without this pair.
    time_first: tuple[int, int] | None = None
    training: bool = False  # In training, a drop policy may draw random numbers.
    bias_E: Tensor | None = None  # This bias changes the choice of experts, not the gate weights.


def evaluates_as_in_training(config: MoEConfig) -> bool:
    """Return whether evaluation uses the training capacity, as an option or expert choice demands."""
    fraction = config.eval_capacity_token_fraction
    unset = fraction == 0 and config.eval_capacity_factor == 0
    return fraction < 0 or (config.choice == "experts" and unset)


def capacity_of(
    config: MoEConfig, training: bool, factor: float | Capacity | None = None, sentences: int = 1
) -> Capacity:
    """Return the capacity rule of a forward pass, which is `factor` if given, else the configured rule.

    The option `eval_sentence_length` needs `sentences`, the number of sentences in the micro-batch.
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
        tokens=config.eval_sentence_length * sentences,
        minimum=config.min_capacity,
        multiple=config.capacity_multiple,
    )


# A drop policy is a function that returns the order [N] int64 in which assignments get slots. Assignments
# with equal scores are in the order of `by_position`. scores_TE has no gradient. position_T [T] int64 lists
# the tokens in (sentence, time) order. A drop policy may draw random numbers only in training.


def by_position(scores_TE: Tensor, expert_ids_TK: Tensor, position_T: Tensor, training: bool) -> Tensor:
    """Order assignments by choice (first choices first), then by the token's sentence and time."""
    return _choice_by_choice(position_T.expand(expert_ids_TK.shape[1], -1))


def by_largest_score(
    scores_TE: Tensor, expert_ids_TK: Tensor, position_T: Tensor, training: bool
) -> Tensor:
    """Order assignments by choice, then by the token's best score, largest first (Riquelme et al. 2021)."""
    importance_T = scores_TE.amax(dim=1)[position_T]
    position_T = position_T[importance_T.argsort(descending=True, stable=True)]
    return by_position(scores_TE, expert_ids_TK, position_T, training)


def at_random(scores_TE: Tensor, expert_ids_TK: Tensor, position_T: Tensor, training: bool) -> Tensor:
    """Order assignments by choice, then at random. In evaluation, return the order of `by_position`.

    The drop policy is from DeepSpeed-MoE (Rajbhandari et al. 2022).
    """
    if not training:
        return by_position(scores_TE, expert_ids_TK, position_T, training)
    num_tokens, top_k = expert_ids_TK.shape
    # In half precision, many random numbers would be equal, and ties would favor earlier tokens.
    keys_KT = torch.rand(top_k, num_tokens, device=position_T.device, dtype=torch.float32)
    return _choice_by_choice(keys_KT.argsort(dim=1))


def by_own_score(scores_TE: Tensor, expert_ids_TK: Tensor, position_T: Tensor, training: bool) -> Tensor:
    """Order the assignments of all choices together by the gate's score for their expert, largest first."""
    order_N = by_position(scores_TE, expert_ids_TK, position_T, training)
    scores_N = scores_TE.gather(1, expert_ids_TK).t().flatten()[order_N]
    return order_N[scores_N.argsort(descending=True, stable=True)]


def _choice_by_choice(order_KT: Tensor) -> Tensor:
    """Concatenate the token orders of all choices to one order of assignments [N], first choices first."""
    top_k, num_tokens = order_KT.shape
    first_K1 = torch.arange(top_k, device=order_KT.device).unsqueeze(1) * num_tokens
    return (order_KT + first_K1).flatten()


DROP_POLICIES = {
    "position": by_position,
    "bpr": by_largest_score,
    "rts": at_random,
    "probability": by_own_score,
}


def sentence_order(num_tokens: int, time_first: tuple[int, int] | None, device: torch.device) -> Tensor:
    """Return the indices [T] int64 of the tokens in (sentence, time) order."""
    tokens_T = torch.arange(num_tokens, device=device)
    return tokens_T if time_first is None else tokens_T.view(time_first).t().reshape(-1)


def place_assignments(
    expert_ids_TK: Tensor,
    scores_TE: Tensor,
    requested_TK: Tensor | None,
    num_tokens: Tensor | None,
    config: MoEConfig,
    batch: MicroBatch,
) -> Rows:
    """Give slots to each expert's requested assignments, and rows to those within the capacity.

    Args:
        expert_ids_TK: int64, the chosen experts.
        scores_TE: the experts' scores, which order assignments in some drop policies.
        requested_TK: bool, False for assignments to leave out; None leaves out no assignment. Padding is
            always left out.
        num_tokens: [] int64, the number of tokens without padding; None if there is no capacity limit.
        config: the options of the layer.
        batch: the arguments of the micro-batch.
    """
    length, num_experts = scores_TE.shape
    top_k, capacity, asked_TK = expert_ids_TK.shape[1], batch.capacity, requested_TK
    if batch.real_T is not None:
        real_TK = batch.real_T.unsqueeze(1).expand(-1, top_k)
        asked_TK = real_TK if requested_TK is None else real_TK & requested_TK
    limit = None if num_tokens is None else capacity.slots(top_k, num_experts, num_tokens)
    order_N, time_first = None, batch.time_first
    if limit is not None and config.drop_policy != "position":
        position_T = sentence_order(length, time_first, scores_TE.device)
        order = DROP_POLICIES[config.drop_policy]
        order_N, time_first = order(scores_TE.detach(), expert_ids_TK, position_T, batch.training), None
    ops = kernels.ops(config.backend, scores_TE.device)
    return ops.assign_rows(expert_ids_TK, num_experts, asked_TK, order_N, time_first, limit)
