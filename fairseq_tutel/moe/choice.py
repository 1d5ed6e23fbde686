"""Chooses experts for tokens, or tokens for experts, by scores that are computed from gate logits.

Each way to choose experts has a line in `ways_of` and a function named after its flag. For example, flag
--moe-rsample has `rsample_keys`, tests/moe/test_choice.py::test_rsample_… and a row in docs/routing.md.
T tokens, E experts, K top_k, G groups of experts. Only scores and gate weights have gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels import gate_product
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.reference_route import choose_experts, normalized, row_softmax
from fairseq_tutel.moe.build import is_hooked
from fairseq_tutel.moe.config import MoEConfig, check_top_k
from fairseq_tutel.moe.gates import LinearGate
from fairseq_tutel.moe.slots import MicroBatch


@dataclass(eq=False, kw_only=True)
class Chosen:
    """The experts that each token chose, with their weights, before slots are assigned."""

    scores_TE: Tensor  # the scores by which the experts were chosen
    probs_TE: Tensor  # as in `Routing`
    expert_ids_TK: Tensor  # int64, best first
    weights_TK: Tensor  # weights of all assignments


# A token chooses the experts with the K largest keys. A key of -inf excludes an expert. A way is a function
# that returns new keys from keys_TE and logits_TE, without gradients.
Way = Callable[[Tensor, Tensor], Tensor]


def ways_of(config: MoEConfig, batch: MicroBatch) -> list[Way]:
    """Return, in order, the functions that change the experts' keys, which are initially the scores.

    The fused kernel of softmax and top-k runs only if the list is empty.
    """
    top_k, training, function = batch.top_k, batch.training, config.score_function
    bias_E: Any = batch.bias_E
    groups, kept = config.expert_groups, config.groups_per_token
    is_sampled = config.second_expert_policy == "sampling" and top_k > 1
    ways: tuple[tuple[bool, Way], ...] = (
        (bias_E is not None, lambda keys, _: keys + bias_E),
        (kept < groups, lambda keys, _: mask_expert_groups(keys, groups, kept, top_k)),
        (training and config.rsample, lambda keys, logits: rsample_keys(keys, logits, function)),
        (training and is_sampled, lambda keys, logits: second_expert_policy_keys(keys, logits, function)),
    )
    return [way for is_used, way in ways if is_used]


def choose(logits_TE: Tensor, config: MoEConfig, batch: MicroBatch) -> Chosen:
    """Choose the top-k experts of every token and compute their weights."""
    top_k = batch.top_k
    check_top_k(top_k, config)
    ways = ways_of(config, batch)
    ops = kernels.ops(config.backend, logits_TE.device)
    normalize = config.normalize_gate == "before" and top_k > 1
    if not ways and config.score_function == "softmax":
        probs_TE, expert_ids_TK, weights_TK = softmax_top_k(logits_TE, top_k, ops, normalize)
        scores_TE = probs_TE
    else:
        scores_TE, probs_TE = scores_of(logits_TE, config.score_function)
        keys_TE = scores_TE.detach()
        for way in ways:
            keys_TE = way(keys_TE, logits_TE.detach())
        expert_ids_TK = choose_experts(keys_TE, top_k)
        weights_TK = scores_TE.gather(1, expert_ids_TK)
        weights_TK = normalized(weights_TK) if normalize else weights_TK
    return Chosen(
        scores_TE=scores_TE, probs_TE=probs_TE, expert_ids_TK=expert_ids_TK, weights_TK=weights_TK
    )


def choose_from(
    gate: Any, x_TD: Tensor, config: MoEConfig, batch: MicroBatch
) -> tuple[Tensor, Tensor, Chosen] | None:
    """Compute logits and choose experts in one autograd node; return None if an option prevents this.

    The results are the tokens (as an output of the node), the logits, and the chosen experts.
    """
    can_fuse = (
        type(gate) is LinearGate
        and torch.is_grad_enabled()
        and gate.fp32_gate
        and gate_product.is_supported(x_TD, gate.weight)
        and config.choice == "tokens"
        and config.score_function == "softmax"
        and not (batch.training and config.gate_noise)
        and not ways_of(config, batch)
        and not is_hooked(gate)
        and not torch.is_autocast_enabled(x_TD.device.type)
        and not torch.compiler.is_dynamo_compiling()
        and not isinstance(x_TD, FakeTensor)
    )
    if not can_fuse or not hasattr(ops := kernels.ops(config.backend, x_TD.device), "gate_backward"):
        return None
    check_top_k(batch.top_k, config)
    normalize = config.normalize_gate == "before" and batch.top_k > 1
    passed_TD, logits_TE, probs_TE, expert_ids_TK, weights_TK = gate_product.choice(
        x_TD, gate.weight, batch.top_k, ops, normalize
    )
    chosen = Chosen(
        scores_TE=probs_TE, probs_TE=probs_TE, expert_ids_TK=expert_ids_TK, weights_TK=weights_TK
    )
    return passed_TD, logits_TE, chosen


def scores_of(logits_TE: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Return the experts' scores, and the scores normalized to sum to 1 per token: scores_TE, probs_TE."""
    if score_function == "softmax":
        probs_TE = row_softmax(logits_TE)
        return probs_TE, probs_TE
    scores_TE = torch.sigmoid(logits_TE)
    return scores_TE, normalized(scores_TE)


def softmax_top_k(
    logits_TE: Tensor, top_k: int, ops: Any, normalize: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by softmax and top-k in one kernel and one autograd node, for default options.

    With `normalize`, a token's weights are divided by their sum.
    """
    device = logits_TE.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as torch.softmax does under autocast
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if not (torch.is_grad_enabled() and logits_TE.requires_grad):
        return ops.softmax_top_k(logits_TE, top_k, normalize)
    return _SoftmaxTopK.apply(logits_TE, top_k, ops, normalize)


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, top_k: int, ops: Any, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k, normalize)
        ctx.save_for_backward(probs_TE, ids_TK)
        ctx.set_materialize_grads(False)
        ctx.ops, ctx.normalize = ops, normalize
        return probs_TE, ids_TK, weights_TK

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dprobs_TE: Tensor | None, _: None, dweights_TK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        probs_TE, ids_TK = ctx.saved_tensors
        if dprobs_TE is None and dweights_TK is None:
            return None, None, None, None
        dlogits_TE = ctx.ops.softmax_top_k_backward(probs_TE, ids_TK, dprobs_TE, dweights_TK, ctx.normalize)
        return dlogits_TE, None, None, None


def rsample_keys(keys_TE: Tensor, logits_TE: Tensor, score_function: str) -> Tensor:
    """Return random keys. Their top-k samples experts by score without replacement (Kool et al. 2019)."""
    # In half precision, many random keys would be equal, which would favour experts with low IDs.
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    log_scores_TE = logits_TE if score_function == "softmax" else F.logsigmoid(logits_TE)
    gumbel_TE = -torch.empty_like(logits_TE).exponential_().log()
    return _instead(keys_TE, log_scores_TE + gumbel_TE)


def second_expert_policy_keys(keys_TE: Tensor, logits_TE: Tensor, score_function: str) -> Tensor:
    """Return keys whose top-k keeps the best expert of `keys_TE` and samples the other experts by score."""
    sampled_TE = rsample_keys(keys_TE, logits_TE, score_function)
    return sampled_TE.scatter_(1, choose_experts(keys_TE, 1), math.inf)


def _instead(keys_TE: Tensor, new_TE: Tensor) -> Tensor:
    """Return the new keys, with -inf only for the experts that the old keys exclude."""
    new_TE = new_TE.clamp_min(torch.finfo(new_TE.dtype).min)
    return new_TE.masked_fill(keys_TE.isneginf(), -math.inf)


def mask_expert_groups(keys_TE: Tensor, groups: int, kept: int, top_k: int) -> Tensor:
    """For each token, set the keys of all experts outside its `kept` best groups to -inf.

    A group is E / groups neighbouring experts. Its score is the sum of its max(K / kept, 1) largest keys.

    The method is from DeepSeek-V3 (2024), section 2.1.2, which adds two keys per group (K = 8, kept = 4).
    """
    num_tokens, num_experts = keys_TE.shape
    by_group_TGe = keys_TE.view(num_tokens, groups, num_experts // groups)
    best = min(max(top_k // kept, 1), num_experts // groups)
    group_scores_TG = by_group_TGe.topk(best, dim=2).values.sum(dim=2)
    open_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    open_TG.scatter_(1, choose_experts(group_scores_TG, kept), True)
    open_TE = open_TG.repeat_interleave(num_experts // groups, dim=1)
    return keys_TE.masked_fill(~open_TE, -math.inf)


def sampled_choices(weights_TK: Tensor) -> Tensor:
    """Keep first choices; keep other choices with probability min(1, K * weight) (GShard, section 2.2)."""
    top_k = weights_TK.shape[1]
    # Random numbers are drawn in fp32, because half precision is too coarse.
    draws_TK = torch.rand(weights_TK.shape, device=weights_TK.device, dtype=torch.float32)
    requested_TK = draws_TK < top_k * weights_TK.detach()
    requested_TK[:, :1] = True
    return requested_TK


def experts_choose(
    scores_TE: Tensor, capacity: Tensor, position_T: Tensor, real_T: Tensor | None
) -> Tensor:
    """Let experts choose tokens; return each token's slot in each expert, or -1: slots_TE int64.

    Each expert chooses `capacity` tokens and no padding. Among equal scores, the token wins that is first
    in `position_T`, the (sentence, time) order.

    The method is from Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing, section 3.2.
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
