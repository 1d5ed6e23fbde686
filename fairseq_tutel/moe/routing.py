"""Routing: computes the experts, slots and rows of every token from the gate's logits.

T tokens, E experts, K top_k, C capacity, R rows of a buffer that is sorted by expert. A row has source
t * K + j if it belongs to choice j of token t.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.reference_route import normalized, row_maps, token_of
from fairseq_tutel.moe.choice import (
    Chosen,
    choose,
    experts_choose,
    sampled_choices,
    scores_of,
)
from fairseq_tutel.moe.config import MoEConfig, check_top_k
from fairseq_tutel.moe.slots import Capacity, MicroBatch, place_assignments, sentence_order
from fairseq_tutel.parallel.groups import Topology


@dataclass(eq=False, kw_only=True)
class GateOutput:
    """The gate's results that balance losses use in addition to the routing."""

    logits_TE: Tensor  # the logits by which experts were chosen, with noise in training
    clean_TE: Tensor  # the logits before noise; the same tensor if there is no noise
    noise: float = 0.0  # standard deviation of the noise that is added to logits
    score_function: str = "softmax"
    sentences: tuple[int, int] | None = None  # (S, time) of the micro-batch; None for one sentence
    time_first: bool = False  # whether x is [time, S, D], so that token t is of sentence t % S
    cmr_T1: Tensor | None = None  # differentiable, the CMR gate g of each token; None without CMR
    topology: Topology | None = None  # the ranks whose loads `gshard_global` adds; None in evaluation
    backend: str = "auto"  # backend of the kernels
    # If the gate is one autograd node: its input tokens, and the same tokens as an output of the node.
    x_TD: Tensor | None = None
    passed_TD: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Routing:
    """The assignments of tokens to experts in one micro-batch on one rank.

    Dispatch, exchange, balance losses and metrics read this object. Invariants:

    - Slot -1: the assignment was left out, for example because the token is padding. Any assignment of a
      token can be left out, including the first.
    - Row -1: the assignment has no row, because it was left out or dropped.
    - Expert IDs are from 0 to E - 1, also for assignments that were left out. Expert IDs can therefore
      always be used as indices.
    - counts_E counts assignments with a row, assigned_KE assignments with a slot. dropped_K counts
      assignments with a slot but no row, unless experts choose tokens; see `_decide_by_experts`.

    Attributes:
        expert_ids_TK: int64, the experts of each token, best first.
        weights_TK: factors of the experts' outputs, in the dtype of the logits, differentiable.
        slots_TK: int64, the slot of each assignment, also of dropped assignments; -1 if left out.
        counts_E: int64, the number of rows of each expert.
        assigned_KE: int64, the number of assignments of choice j to expert e, before dropping.
        dropped_K: int64, the number of dropped assignments of each choice.
        probs_TE: every expert's score, divided by the token's sum of scores, differentiable.
        real_T: bool, False for padding; None if there is no padding.
        row_of_TK: int64, the row of each assignment; -1 if it has no row.
        source_of_R: int64, the source of each row; -1 for an empty row.
        token_of_R: int64, the token of each row; -1 for an empty row.
        tiles: the tables of row tiles, if a kernel wrote them; see `Groups.tiles`.
        capacity: in the padded layout, the number of rows of each expert (row = e * C + slot). None in the
            compact layout, which has no gaps between experts' rows (row = first row of e + slot).
        gate: values for balance losses; None if there was no gate.

    Example:
        >>> routing = ft.route(torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), top_k=1)
        >>> routing.expert_ids_TK.tolist(), routing.counts_E.tolist()
        ([[0], [2]], [1, 0, 1])
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    slots_TK: Tensor
    counts_E: Tensor
    assigned_KE: Tensor
    dropped_K: Tensor
    probs_TE: Tensor
    real_T: Tensor | None
    row_of_TK: Tensor
    source_of_R: Tensor
    token_of_R: Tensor
    tiles: Tensor | None = None
    capacity: int | None
    gate: GateOutput | None

    @cached_property
    def num_tokens(self) -> Tensor:
        """The number of tokens without padding, [] int64."""
        return _count_tokens(self.expert_ids_TK, self.real_T)

    @cached_property
    def sums(self) -> Tensor:
        """The sums over tokens that losses and metrics share, without gradients; see `token_sums`.

        With expert choice, a token has a weight for each expert that chose it. Only the first K are summed.
        """
        ops = ops_of(self.gate, self.probs_TE.device)
        weights_TK = self.weights_TK[:, : self.dropped_K.shape[0]].detach()
        return ops.token_sums(self.probs_TE.detach(), weights_TK, self.real_T)

    @cached_property
    def groups(self) -> Groups:
        """The number of rows of each expert, read on the host at most once."""
        return Groups.of_tensor(self.counts_E, self.tiles, self.source_of_R.shape[0])


def ops_of(gate: GateOutput | None, device: torch.device) -> Any:
    """Return the kernels of the gate's backend; None stands for the best backend of the device."""
    return kernels.ops("auto" if gate is None else gate.backend, device)


def decide(
    logits_TE: Tensor,
    config: MoEConfig,
    batch: MicroBatch,
    gate: GateOutput | None = None,
    chosen: Chosen | None = None,
) -> Routing:
    """Choose experts, slots and rows for every token and return the routing.

    If `chosen` is None, `choose` is called. The rows are in the compact layout, which has no gaps
    between experts' rows.

    The capacity and the order of assignments are from GShard (Lepikhin et al. 2020), section 2.2.
    """
    if config.choice == "experts":
        return _decide_by_experts(logits_TE, config, batch, gate)
    return placed(chosen or choose(logits_TE, config, batch), config, batch, gate)


def placed(chosen: Chosen, config: MoEConfig, batch: MicroBatch, gate: GateOutput | None = None) -> Routing:
    """Assign slots and rows to the assignments of the chosen experts and return the routing."""
    expert_ids_TK, weights_TK = chosen.expert_ids_TK, chosen.weights_TK
    top_k = expert_ids_TK.shape[1]
    requested_TK = None
    if config.second_expert_policy == "random" and batch.training and top_k > 1:
        requested_TK = sampled_choices(weights_TK)
    num_tokens = _count_tokens(expert_ids_TK, batch.real_T) if batch.capacity.is_limited else None
    rows = place_assignments(expert_ids_TK, chosen.scores_TE, requested_TK, num_tokens, config, batch)
    if config.normalize_gate == "after" and top_k > 1:
        weights_TK = normalized(weights_TK.masked_fill(rows.row_of_TK < 0, 0.0))
    return Routing(
        expert_ids_TK=expert_ids_TK, weights_TK=scaled(weights_TK, config, batch.training),
        probs_TE=chosen.probs_TE, real_T=batch.real_T, capacity=None, gate=gate,
        **rows._asdict(),
    )  # fmt: skip


def _decide_by_experts(
    logits_TE: Tensor, config: MoEConfig, batch: MicroBatch, gate: GateOutput | None
) -> Routing:
    """Let every expert choose tokens, and return the routing, without gaps between experts' rows.

    A token has K' expert IDs: first the experts that chose the token (lowest ID first), then others. On the
    CPU, K' is the largest number of experts that chose one token, but at least K. On other devices K' is E,
    which avoids a device-to-host read. `assigned_KE[0]` counts all assignments. `dropped_K[0]` counts the
    tokens, without padding, that no expert chose. All other entries of `assigned_KE` and `dropped_K` are 0.
    """
    length, num_experts = logits_TE.shape
    top_k, capacity, real_T = batch.top_k, batch.capacity, batch.real_T
    check_top_k(top_k, config)
    scores_TE, probs_TE = scores_of(logits_TE, config.score_function)
    if not capacity.is_limited:
        capacity = replace(capacity, factor=1.0)
    num_tokens = _count_tokens(scores_TE, real_T)
    limit = capacity.slots(top_k, num_experts, num_tokens)
    position_T = sentence_order(length, batch.time_first, scores_TE.device)
    slots_TE = experts_choose(scores_TE.detach(), limit, position_T, real_T)
    taken_TE = slots_TE >= 0
    on_cpu = scores_TE.device.type == "cpu"
    columns = int(taken_TE.sum(dim=1).amax()) if on_cpu and length else num_experts
    columns = max(columns, top_k)
    expert_ids_TK = taken_TE.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    expert_ids_TK = expert_ids_TK[:, :columns]
    slots_TK = slots_TE.gather(1, expert_ids_TK)
    kept_TK = slots_TK >= 0
    weights_TK = scores_TE.gather(1, expert_ids_TK).masked_fill(~kept_TK, 0.0)
    if config.normalize_gate == "after":
        weights_TK = normalized(weights_TK)
    counts_E = taken_TE.sum(dim=0)
    assigned_KE = counts_E.new_zeros(top_k, num_experts)
    assigned_KE[0] = counts_E
    dropped_K = counts_E.new_zeros(top_k)
    dropped_K[0] = num_tokens - taken_TE.any(dim=1).sum()
    most = min(capacity.most_slots(top_k, num_experts, length), length)
    weights_TK = scaled(weights_TK, config, batch.training)
    row_of_TK, source_of_R = row_maps(expert_ids_TK, slots_TK, kept_TK, counts_E, None, most * num_experts)
    return Routing(
        expert_ids_TK=expert_ids_TK, weights_TK=weights_TK, slots_TK=slots_TK, counts_E=counts_E,
        assigned_KE=assigned_KE, dropped_K=dropped_K, probs_TE=probs_TE,
        real_T=real_T, row_of_TK=row_of_TK, source_of_R=source_of_R,
        token_of_R=token_of(source_of_R, columns), capacity=None, gate=gate,
    )  # fmt: skip


def _count_tokens(values_TX: Tensor, real_T: Tensor | None) -> Tensor:
    """Return the number of tokens that are not padding, as an int64 scalar; T if `real_T` is None."""
    if real_T is not None:
        return real_T.sum()
    # The tensor is filled on the device, because a copy from the host would wait for the device.
    return torch.full((), len(values_TX), device=values_TX.device)


def padded(routing: Routing, capacity: int) -> Routing:
    """Convert a routing in the compact layout to the padded layout, with `capacity` rows per expert."""
    row_of_TK, source_of_R = row_maps(
        routing.expert_ids_TK, routing.slots_TK, routing.row_of_TK >= 0, routing.counts_E, capacity, 0
    )
    token_of_R = token_of(source_of_R, row_of_TK.shape[1])
    return replace(
        routing, row_of_TK=row_of_TK, source_of_R=source_of_R, token_of_R=token_of_R, tiles=None,
        capacity=capacity,
    )  # fmt: skip


def scaled(weights_TK: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """Multiply the weights by `routed_scaling_factor`, and apply expert output masking to the weights.

    A weight of 0 masks the output of an assignment and its gradient.
    """
    factor = config.routed_scaling_factor
    weights_TK = weights_TK if factor == 1 else weights_TK * factor
    return mask_outputs(weights_TK, weights_TK.shape[1], config.eom, training)


def mask_outputs(values_TX: Tensor, masks: int, probability: float, training: bool) -> Tensor:
    """In training, set values to 0 with this probability; in evaluation, multiply all by 1 - probability.

    `masks` is the number of random masks per token: 1, or one for each column of `values_TX`.

    Expert output masking is from NLLB Team 2022, section 6.2, and from Meta's nllb branch.
    """
    if probability == 0:
        return values_TX
    if not training:
        return values_TX * (1 - probability)
    draws_TM = torch.rand(len(values_TX), masks, device=values_TX.device, dtype=torch.float32)
    return values_TX.masked_fill(draws_TM < probability, 0.0)


def route(
    logits_TE: Tensor,
    top_k: int,
    capacity_factor: float = 0.0,
    *,
    training: bool = False,
    real_T: Tensor | None = None,
    time_first: tuple[int, int] | None = None,
    bias_E: Tensor | None = None,
    **rules: Any,
) -> Routing:
    """Choose experts, slots and rows for every token from its logits, and return the routing.

    Args:
        logits_TE: the gate's logits, in any float dtype.
        top_k: the number of experts per token, from 1 to E.
        capacity_factor: f > 0 limits each expert to K * ceil(f * T / E) slots; 0 drops nothing.
        training: whether options that draw random numbers, such as `rsample`, have an effect.
        real_T: bool, False for padding; None if there is no padding.
        time_first: (time, batch) if token t is (t // batch, t % batch); None to assign slots in the
            order of tokens.
        bias_E: fp32, added to the scores only to choose experts.
        rules: other routing fields of `MoEConfig`, such as drop_policy="bpr".

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> routing = ft.route(torch.tensor([[2.0, 1.0], [2.0, 0.0], [2.0, 1.5]]), 1, capacity_factor=1)
        >>> routing.row_of_TK.flatten().tolist(), routing.dropped_K.tolist()
        ([0, 1, -1], [1])
    """
    config = MoEConfig(model_dim=1, hidden_dim=1, num_experts=logits_TE.shape[1], top_k=1, **rules)
    batch = MicroBatch(
        top_k=top_k, capacity=Capacity(factor=capacity_factor), real_T=real_T, time_first=time_first,
        training=training, bias_E=bias_E,
    )  # fmt: skip
    return decide(logits_TE, config, batch)
