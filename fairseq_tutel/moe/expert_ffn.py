"""Computes the FFN of all experts as one autograd node that saves only the input, hidden rows and routing.

With row maps, the node includes dispatch, experts and combine. Forward reads rows directly from the tokens.
On a GPU, backward copies the rows of x and dy. It computes the gradient of the gate weights from the hidden
rows. The node therefore saves neither dispatched rows nor expert outputs. T tokens, D model_dim, H
hidden_dim, E experts, K top_k, R rows, N rows of x (T with row maps, R without).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.reference_route import token_of
from fairseq_tutel.kernels.weights import NAMES, FFNWeights, SavedActivations
from fairseq_tutel.moe.expert_stack import Tensors


@dataclass(eq=False, kw_only=True)
class FFNCall:
    """The arguments of the experts' FFN function that are not tensors."""

    ops: Any  # namespace of kernels: `kernels.ops`
    groups: Groups
    activation: str  # activation between the two linear maps; ignored for `glu`
    recompute: bool = False  # whether backward recomputes the hidden rows, which forward then does not save


# The tensors weights_TK (None for weights of 1), row_of_TK, source_of_R and token_of_R of a `Routing`.
RowMaps = tuple[Tensor | None, Tensor, Tensor, Tensor]


def ffn(x_ND: Tensor, tensors: Tensors, call: FFNCall, maps: RowMaps | None = None) -> Tensor:
    """Run the experts' FFNs and return each row's output [R, D], or each token's weighted sum [T, D].

    Without row maps, `x_ND` holds rows sorted by expert, and rows after the last group give 0. With row
    maps, `x_ND` holds the tokens; all rows must be on this rank, without gaps between experts' rows.
    """
    named = [tensors.get(name) for name in NAMES]
    given = maps or (None, None, None, None)
    if torch.is_grad_enabled():
        return _FFN.apply(call, x_ND, *given, *named)
    # Without gradients, a weight may be an `ExpertTensorList`, which autograd cannot save.
    return _FFN.forward(_NoGraph(), call, x_ND, *given, *named)


class _NoGraph:
    """A replacement for the autograd context in a forward pass without a backward pass."""

    needs_input_grad = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Do not save the tensors, because there is no backward pass."""


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FFNCall,
        x_ND: Tensor,
        weights_TK: Tensor | None,
        row_of_TK: Tensor | None,
        source_of_R: Tensor | None,
        token_of_R: Tensor | None,
        *named: Any,
    ) -> Tensor:
        ctx.call, keep = call, not call.recompute and any(ctx.needs_input_grad)
        of_call = FFNWeights(*named), call.groups, call.activation
        y, saved = call.ops.ffn_forward(x_ND, token_of_R, *of_call, keep=keep)
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
        # The token indices of the rows are computed again, because saving them would take 8 T K bytes.
        index_R = None if row_of_TK is None else token_of(source_of_R, row_of_TK.shape[1])
        of_call = FFNWeights(*named), call.groups, call.activation
        saved = SavedActivations(a_RH, h_RH, g_RH)
        if call.recompute:
            saved = ops.ffn_activations(x_ND, index_R, *of_call)
        gates = (None, None) if weights_TK is None else (weights_TK.reshape(-1), source_of_R)
        grads = ops.ffn_backward(
            dy.contiguous(), x_ND, index_R, *gates, of_call[0], saved, *of_call[1:], needs_dx=needs[1],
            needs_weights=any(needs[6:]),
        )  # fmt: skip
        dx, dweights_TK = grads.x_RD, None
        if needs[1] and needs[2]:
            dx, dweights_TK = ops.gather_gradients(dx, row_of_TK, grads.gate_PR)
        elif needs[1] and row_of_TK is not None:
            dx = ops.gather_sum(dx, row_of_TK)
        elif needs[2]:
            dgate_R1 = grads.gate_PR.sum(0).unsqueeze(1)
            dweights_TK = ops.gather_rows(dgate_R1, row_of_TK.reshape(-1)).view(row_of_TK.shape)
        if dweights_TK is not None:
            dweights_TK = dweights_TK.to(weights_TK.dtype)
        of_weights = [None] * len(named) if grads.weights is None else grads.weights
        return None, dx, dweights_TK, None, None, None, *of_weights
