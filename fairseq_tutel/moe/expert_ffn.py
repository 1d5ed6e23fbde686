"""The experts' feed-forward as one autograd node, which saves only its input, h and the routing.

With a routing it does dispatch, experts and combine in one. It reads rows from the tokens directly and
computes the gate weights' gradient from h, so that it saves neither dispatched rows nor experts' outputs.
T tokens, D model_dim, H hidden_dim, E experts, K top_k, R rows, N rows of x: T with a routing, else R.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import NAMES, FFNWeights, SavedActivations
from fairseq_tutel.moe.dispatch import read_assignments, token_of
from fairseq_tutel.moe.expert_stack import Tensors
from fairseq_tutel.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class FFNCall:
    """Arguments of a feed-forward that are no tensors."""

    ops: Any  # the kernels
    groups: Groups
    activation: str  # between the two maps; ignored for `glu`
    recompute: bool = False  # compute h again in backward instead of saving it


def ffn(x_ND: Tensor, tensors: Tensors, call: FFNCall, routing: Routing | None = None) -> Tensor:
    """Return the experts' outputs of every row [R, D], or with a routing every token's weighted sum [T, D].

    `x_ND` are expert-major rows, where a tail behind the groups gives 0. With a routing, in the compact
    layout and with all rows on this rank, they are its tokens.
    """
    named = [tensors.get(name) for name in NAMES]
    maps: tuple[Tensor | None, ...] = None, None, None
    if routing is not None:
        maps = routing.weights_TK, routing.row_of_TK, routing.source_of_R
    if torch.is_grad_enabled():
        return _FFN.apply(call, x_ND, *maps, *named)
    # The tensors may be an expert tensor list then, which autograd cannot save.
    return _FFN.forward(_NoGraph(), call, x_ND, *maps, *named)


class _NoGraph:
    """The context of a forward without backward."""

    needs_input_grad = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Save nothing."""


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FFNCall,
        x_ND: Tensor,
        weights_TK: Tensor | None,
        row_of_TK: Tensor | None,
        source_of_R: Tensor | None,
        *named: Any,
    ) -> Tensor:
        ctx.call, keep = call, not call.recompute and any(ctx.needs_input_grad)
        index_R = _index(row_of_TK, source_of_R)
        of_call = FFNWeights.of(named), call.groups, call.activation
        y, saved = call.ops.ffn_forward(x_ND, index_R, *of_call, keep=keep)
        if row_of_TK is not None:
            y = call.ops.gather_sum(y, row_of_TK, weights_TK)
        ctx.save_for_backward(
            x_ND, weights_TK, row_of_TK, source_of_R, saved.a_RH, saved.h_RH, saved.g_RH, *named
        )
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weights_TK, row_of_TK, source_of_R, a_RH, h_RH, g_RH, *named = ctx.saved_tensors
        call, ops, needs = ctx.call, ctx.call.ops, ctx.needs_input_grad
        index_R = _index(row_of_TK, source_of_R)
        of_call = FFNWeights.of(named), call.groups, call.activation
        saved = SavedActivations(a_RH, h_RH, g_RH)
        if call.recompute:
            saved = ops.ffn_activations(x_ND, index_R, *of_call)
        gate_R = None
        if weights_TK is not None:
            gate_R = read_assignments(weights_TK.reshape(-1), source_of_R)
        grads = ops.ffn_backward(
            dy.contiguous(), x_ND, index_R, gate_R, of_call[0], saved, *of_call[1:], needs_dx=needs[1],
            needs_weights=any(needs[5:]),
        )  # fmt: skip
        dx, dweights_TK = grads.x_RD, None
        if needs[1] and row_of_TK is not None:
            dx = ops.gather_sum(dx, row_of_TK)
        if needs[2]:
            dots_N = read_assignments(grads.gate_R, row_of_TK.reshape(-1))
            dweights_TK = dots_N.view(row_of_TK.shape).masked_fill(row_of_TK < 0, 0.0)
        of_weights = [None] * len(named) if grads.weights is None else grads.weights.tensors()
        return None, dx, dweights_TK, None, None, *of_weights


def _index(row_of_TK: Tensor | None, source_of_R: Tensor | None) -> Tensor | None:
    """Return the token of every row; None without a routing."""
    if row_of_TK is None or source_of_R is None:
        return None
    return token_of(source_of_R, row_of_TK.shape[1])
