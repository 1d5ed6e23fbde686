"""Choice: logits -> scores -> the experts that tokens choose, or the tokens that experts choose.

T tokens, E experts, K top_k, G groups of experts. Only scores and weights have a gradient.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.reference_route import choose_experts
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.options.option import is_whole


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How experts are chosen, weighed and filled; each field is the MoEConfig field of its name."""

    score_function: str = "softmax"
    normalize_gate: str = "before"
    routed_scaling_factor: float = 1.0
    choice: str = "tokens"
    drop_policy: str = "position"
    expert_groups: int = 1
    groups_per_token: int = 1
    second_expert_policy: str = "all"
    rsample: bool = False
    sinkhorn: bool = False
    backend: str = "auto"

    @classmethod
    def of(cls, config: MoEConfig) -> "Rules":
        """Return the rules of a layer's configuration."""
        return cls(**{item.name: getattr(config, item.name) for item in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Padding, order and mode of the tokens that are routed.

    Attributes:
        real_T: [T] bool, False for padding; None without padding.
        time_first: (time, batch) if token t is (t // batch, t % batch), as in fairseq; slots are assigned
            in (sentence, time) order in both layouts.
        training: whether random numbers may be drawn.
    """

    real_T: Tensor | None = None
    time_first: tuple[int, int] | None = None
    training: bool = False


def choose(
    logits_TE: Tensor,
    top_k: int,
    rules: Rules,
    batch: MicroBatch,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the experts of every token; every rule of choice has its line here.

    `bias_E` is added to the scores for the choice alone.

    Returns:
        (scores_TE, probs_TE) of `scores_of`, expert_ids_TK [T, K] int64, best first, and weights_TK [T, K],
        the scores of these experts; all but the IDs are differentiable.
    """
    sampling = rules.second_expert_policy == "sampling" and top_k > 1
    is_sampled = batch.training and (rules.rsample or sampling)
    is_evened = batch.training and rules.sinkhorn
    in_groups = rules.groups_per_token < rules.expert_groups
    as_scored = bias_E is None and not (is_sampled or is_evened or in_groups)
    ops = kernels.ops(rules.backend, logits_TE.device)
    if as_scored and rules.score_function == "softmax" and ops is not kernels.reference:
        probs_TE, expert_ids_TK, weights_TK = softmax_top_k(logits_TE, top_k, ops)
        return probs_TE, probs_TE, expert_ids_TK, weights_TK
    scores_TE, probs_TE = scores_of(logits_TE, rules.score_function)
    best_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    groups, kept = rules.expert_groups, rules.groups_per_token
    keys_TE = best_TE
    if is_sampled:
        keys_TE = sampling_keys(logits_TE.detach(), rules.score_function)
        if not rules.rsample:  # the first choice is not sampled
            first_T1 = choose_experts(mask_groups(best_TE, best_TE, groups, kept, top_k), 1)
            keys_TE.scatter_(1, first_T1, math.inf)
    elif is_evened:
        keys_TE = sinkhorn_keys(logits_TE.detach(), batch.real_T)
    keys_TE = mask_groups(keys_TE, best_TE, groups, kept, top_k)
    expert_ids_TK = choose_experts(keys_TE, top_k)
    return scores_TE, probs_TE, expert_ids_TK, scores_TE.gather(1, expert_ids_TK)


def check_top_k(top_k: int, num_experts: int, rules: Rules) -> None:
    """Raise ValueError if top_k exceeds the experts, or those in a token's groups."""
    most = num_experts // rules.expert_groups * rules.groups_per_token
    if not (is_whole(top_k) and 1 <= top_k <= most):
        groups = f" in {rules.groups_per_token} group(s)" if rules.expert_groups > 1 else ""
        raise ValueError(
            f"top_k is {top_k!r} but there are {most} experts{groups}; choose a value from 1 to {most}."
        )


def scores_of(logits_TE: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Return (scores_TE, probs_TE): the experts' scores, and the same normalized to sum to 1 per token."""
    if score_function == "softmax":
        probs_TE = torch.softmax(logits_TE, dim=1)
        return probs_TE, probs_TE
    scores_TE = torch.sigmoid(logits_TE)
    total_T1 = scores_TE.sum(dim=1, keepdim=True)
    return scores_TE, scores_TE / total_T1.clamp_min(torch.finfo(scores_TE.dtype).tiny)


def softmax_top_k(logits_TE: Tensor, top_k: int, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The most common choice as one autograd node and kernel: softmax over the experts, then top K.

    Returns:
        probs_TE, ids_TK int64, and the chosen experts' probabilities weights_TK.
    """
    if torch.is_autocast_enabled(logits_TE.device.type):  # as torch.softmax does
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return _SoftmaxTopK.apply(logits_TE, top_k, ops)


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, top_k: int, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k)
        ctx.save_for_backward(probs_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        ctx.ops = ops
        return probs_TE, ids_TK, weights_TK

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dprobs_TE: Tensor | None, _: None, dweights_TK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        probs_TE, ids_TK = ctx.saved_tensors
        if dprobs_TE is None and dweights_TK is None:
            return None, None, None
        return ctx.ops.softmax_top_k_backward(probs_TE, ids_TK, dprobs_TE, dweights_TK), None, None


def sampling_keys(logits_TE: Tensor, score_function: str) -> Tensor:
    """Return keys whose K largest are K experts drawn without replacement, in proportion to their scores.

    Source: the Gumbel-top-k trick (Kool et al. 2019); for K = 1 DeepSpeed-MoE's RSample.
    """
    # In half precision many draws would be equal, and the lower ID would be preferred.
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    log_scores_TE = logits_TE if score_function == "softmax" else F.logsigmoid(logits_TE)
    gumbel_TE = -torch.empty_like(logits_TE).exponential_().log()
    # -inf marks experts that cannot be chosen: chosen before, or outside the groups.
    return (log_scores_TE + gumbel_TE).clamp_min(torch.finfo(logits_TE.dtype).min)


# Loads within some percent if logits differ by up to 10; a fixed number needs no device-to-host read.
SINKHORN_ROUNDS = 16


def sinkhorn_keys(logits_TE: Tensor, real_T: Tensor | None) -> Tensor:
    """Return keys that spread the tokens of a micro-batch evenly over the experts.

    The keys are the logits plus one number per expert, such that exp(keys), normalized by token, has the
    same sum for every expert.

    Source: Sinkhorn 1967; S-BASE routing (Clark et al. 2022), section 3.1.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    shift_E = logits_TE.new_zeros(logits_TE.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        log_probs_TE = torch.log_softmax(logits_TE + shift_E, dim=1)
        if real_T is not None:
            log_probs_TE = log_probs_TE.masked_fill(~real_T.unsqueeze(1), -math.inf)
        log_load_E = torch.logsumexp(log_probs_TE, dim=0)
        # An expert that no token can choose has no load to balance.
        is_open_E = log_load_E.isfinite()
        mean = log_load_E.where(is_open_E, 0.0).sum() / is_open_E.sum().clamp_min(1)
        shift_E = shift_E - (log_load_E - mean).where(is_open_E, 0.0)
    # -inf marks experts that were chosen before, or are outside the groups.
    return (logits_TE + shift_E).clamp_min(torch.finfo(logits_TE.dtype).min)


def mask_groups(keys_TE: Tensor, scores_TE: Tensor, groups: int, kept: int, top_k: int) -> Tensor:
    """Return the keys, -inf outside each token's best groups of neighbouring experts.

    Args:
        keys_TE: the experts with the largest keys will be chosen.
        scores_TE: a group's score is the sum of its max(K / kept, 1) largest.
        groups: G, a divisor of E.
        kept: groups that a token can choose from.
        top_k: K.

    Source: DeepSeek-V3 (2024), section 2.1.2: two scores of a group for K = 8 and 4 groups.
    """
    if kept == groups:
        return keys_TE
    num_tokens, num_experts = scores_TE.shape
    by_group_TGe = scores_TE.view(num_tokens, groups, num_experts // groups)
    best = min(max(top_k // kept, 1), num_experts // groups)
    group_scores_TG = by_group_TGe.topk(best, dim=2).values.sum(dim=2)
    open_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    open_TG.scatter_(1, choose_experts(group_scores_TG, kept), True)
    open_TE = open_TG.repeat_interleave(num_experts // groups, dim=1)
    return keys_TE.masked_fill(~open_TE, -math.inf)


def sampled_choices(weights_TK: Tensor) -> Tensor:
    """Return [T, K] bool: the first choice always, every other with probability min(1, K * weight).

    Source: GShard (Lepikhin et al. 2020), section 2.2, random routing: 2 * g_2 for K = 2.
    """
    top_k = weights_TK.shape[1]
    # fp32, since half precision is too coarse.
    draws_TK = torch.rand(weights_TK.shape, device=weights_TK.device, dtype=torch.float32)
    requested_TK = draws_TK < top_k * weights_TK.detach()
    requested_TK[:, :1] = True
    return requested_TK


def experts_choose(
    scores_TE: Tensor, capacity: Tensor, position_T: Tensor, real_T: Tensor | None
) -> Tensor:
    """Return slots_TE int64: the slot of each token in each expert, -1 if the expert does not choose it.

    Args:
        scores_TE: [T, E], detached.
        capacity: [] int64, the most tokens of an expert.
        position_T: [T] int64, the tokens in the order in which ties are broken.
        real_T: [T] bool, False for padding, which no expert chooses.

    Source: Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing, section 3.2.
    """
    if real_T is not None:
        scores_TE = scores_TE.masked_fill(~real_T.unsqueeze(1), -math.inf)
    order_TE = scores_TE[position_T].argsort(dim=0, descending=True, stable=True)
    ranks_T1 = torch.arange(len(scores_TE), device=scores_TE.device).unsqueeze(1)
    slots_TE = torch.empty_like(order_TE)
    slots_TE.scatter_(0, position_T[order_TE], ranks_T1.expand_as(order_TE))
    taken_TE = slots_TE < capacity
    if real_T is not None:
        taken_TE &= real_T.unsqueeze(1)
    return torch.where(taken_TE, slots_TE, -1)
