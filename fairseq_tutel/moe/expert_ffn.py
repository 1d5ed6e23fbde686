"""The experts' feed-forward as one autograd node, which keeps only what it read, h and the routing.

With a routing it is dispatch, experts and combine in one: rows are read where tokens lie, and the weights'
gradient is taken from h, so that neither dispatched rows nor the experts' outputs are kept. T tokens,
D model_dim, H hidden_dim, E experts, K top_k, R rows, N rows of x: T with a routing, else R.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import NAMES, FFNWeights, Kept
from fairseq_tutel.moe.dispatch import read_copies, token_of
from fairseq_tutel.moe.expert_stack import Tensors
from fairseq_tutel.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class FFNCall:
    """What a call is told beside its tensors.

    Attributes:
        ops: the kernels.
        groups: rows of each expert.
        activation: between the maps of `ffn`; `glu` has its own.
        recompute: keep no h, and make it again in backward.
    """

    ops: Any
    groups: Groups
    activation: str
    recompute: bool = False


def ffn(rows_RD: Tensor, tensors: Tensors, call: FFNCall) -> Tensor:
    """Return every row through its expert: [R, D], expert-major; a tail behind the groups is 0."""
    return _apply(rows_RD, None, None, None, tensors, call)


def mixed_ffn(x_TD: Tensor, routing: Routing, tensors: Tensors, call: FFNCall) -> Tensor:
    """Return every token's weighted sum over its experts: [T, D].

    The compact layout's rows, all of them on this rank.
    """
    x_TD = x_TD.to(tensors["fc1_weight"].dtype)
    maps = routing.row_of_TK, routing.source_of_R
    return _apply(x_TD, routing.weights_TK, *maps, tensors, call)


def _apply(
    x_ND: Tensor,
    weights_TK: Tensor | None,
    row_of_TK: Tensor | None,
    source_of_R: Tensor | None,
    tensors: Tensors,
    call: FFNCall,
) -> Tensor:
    named = [tensors.get(name) for name in NAMES]
    told = x_ND, weights_TK, row_of_TK, source_of_R
    if not torch.is_grad_enabled():  # the tensors may be no stacks then
        return _forward(call, False, *told, named)[0]
    return _FFN.apply(call, not call.recompute, *told, *named)


def _forward(
    call: FFNCall,
    keep: bool,
    x_ND: Tensor,
    weights_TK: Tensor | None,
    row_of_TK: Tensor | None,
    source_of_R: Tensor | None,
    named: Sequence[Any],
) -> tuple[Tensor, Kept]:
    """Return what comes out, and what backward needs where it is to be kept."""
    index_R = _index(row_of_TK, source_of_R)
    y_RD, kept = call.ops.ffn_forward(x_ND, index_R, *_told(call, named), keep=keep)
    if row_of_TK is None:
        return y_RD, kept
    return call.ops.gather_sum(y_RD, row_of_TK, weights_TK), kept


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FFNCall,
        keeps: bool,
        x_ND: Tensor,
        weights_TK: Tensor | None,
        row_of_TK: Tensor | None,
        source_of_R: Tensor | None,
        *named: Tensor | None,
    ) -> Tensor:
        ctx.call, keep = call, keeps and any(ctx.needs_input_grad)
        told = x_ND, weights_TK, row_of_TK, source_of_R
        y, kept = _forward(call, keep, *told, named)
        ctx.save_for_backward(*told, kept.a_RH, kept.h_RH, kept.g_RH, *named)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weights_TK, row_of_TK, source_of_R, a_RH, h_RH, g_RH, *named = ctx.saved_tensors
        call, ops, needs = ctx.call, ctx.call.ops, ctx.needs_input_grad
        index_R, told = _index(row_of_TK, source_of_R), _told(call, named)
        kept = Kept(a_RH, h_RH, g_RH)
        if call.recompute:
            kept = ops.ffn_kept(x_ND, index_R, *told)
        gate_R = None
        if weights_TK is not None:
            gate_R = read_copies(weights_TK.reshape(-1), source_of_R)
        grads = ops.ffn_backward(
            dy.contiguous(),
            x_ND,
            index_R,
            gate_R,
            told[0],
            kept,
            *told[1:],
            needs_dx=needs[2],
            needs_weights=any(needs[6:]),
        )
        dx, dweights_TK = grads.x_RD, None
        if needs[2] and row_of_TK is not None:
            dx = ops.gather_sum(dx, row_of_TK)
        if needs[3]:
            dots_N = read_copies(grads.gate_R, row_of_TK.reshape(-1))
            dweights_TK = dots_N.view(row_of_TK.shape).masked_fill(row_of_TK < 0, 0.0)
        of_weights = [None] * len(named) if grads.weights is None else grads.weights.tensors()
        return None, None, dx, dweights_TK, None, None, *of_weights


def _index(row_of_TK: Tensor | None, source_of_R: Tensor | None) -> Tensor | None:
    """Return the token of every row; None where rows are their own."""
    if row_of_TK is None or source_of_R is None:
        return None
    return token_of(source_of_R, row_of_TK.shape[1])


def _told(call: FFNCall, named: Sequence[Tensor | None]) -> tuple[FFNWeights, Groups, str]:
    return FFNWeights.of(named), call.groups, call.activation
