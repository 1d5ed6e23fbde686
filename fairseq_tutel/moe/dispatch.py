"""Dispatch and combine on one rank: copy tokens to rows by expert, and sum the rows of each token.

Dispatch maps x_TD to rows_RD, and combine maps rows_RD to y_TD. They are adjoint to each other. Forward and
backward of both are gathers that use the maps between assignments and rows. They use no scatters or
atomics, so equal inputs give bit-identical results. T tokens, D model_dim, K top_k, R rows.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.reference_route import token_of
from fairseq_tutel.moe.routing import Routing


def dispatch(x_TD: Tensor, routing: Routing, backend: str = "auto", prescore: bool = False) -> Tensor:
    """Copy tokens to rows sorted by expert; with `prescore`, multiply each row by its gate weight.

    Args:
        x_TD: the tokens, in any float dtype, differentiable.
        routing: the rows of each token.
        backend: "reference" (plain torch), "triton", or "auto" for the best of the device.
        prescore: multiply rows by weights, so that `combine` with `prescore` only adds them.

    Returns:
        rows_RD in the dtype of x_TD. Empty rows are 0.

    Example:
        >>> routing = ft.route(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), top_k=1)
        >>> ft.dispatch(torch.tensor([[1.0], [2.0]]), routing).tolist()
        [[2.0], [1.0]]
    """
    ops = kernels.ops(backend, x_TD.device)
    weights_TK = routing.weights_TK if prescore else None
    return _Dispatch.apply(x_TD, weights_TK, routing.row_of_TK, routing.source_of_R, ops)


def combine(rows_RD: Tensor, routing: Routing, backend: str = "auto", prescore: bool = False) -> Tensor:
    """Return each token's sum of expert outputs; the sum is weighted unless `prescore` is set.

    Args:
        rows_RD: the experts' outputs, in any float dtype, differentiable. It may be shorter than R,
            because the unused tail of the compact layout can be cut.
        routing: the rows and weights of each token.
        backend: as in `dispatch`.
        prescore: whether `dispatch` has multiplied the rows by the weights.

    Returns:
        y_TD in the dtype of rows_RD; 0 for tokens without rows.

    Example:
        >>> routing = ft.route(torch.zeros(3, 4), top_k=2)
        >>> x = torch.randn(3, 8)
        >>> torch.allclose(ft.combine(ft.dispatch(x, routing), routing), x)  # the weights sum to 1
        True
    """
    ops = kernels.ops(backend, rows_RD.device)
    source_of_R = routing.source_of_R[: rows_RD.shape[0]]
    weights_TK = None if prescore else routing.weights_TK
    return _Combine.apply(rows_RD, weights_TK, routing.row_of_TK, source_of_R, ops)


class _Dispatch(torch.autograd.Function):
    """Copy a token to each row: rows[r] = x[token of r], times the assignment's weight if given."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor | None, row_of_TK: Tensor, source_of_R: Tensor, ops: Any
    ) -> Tensor:
        ctx.ops, token_of_R = ops, token_of(source_of_R, row_of_TK.shape[1])
        if weights_TK is None:
            ctx.save_for_backward(None, None, row_of_TK)
            return ops.gather_rows(x_TD, token_of_R)
        ctx.save_for_backward(x_TD, weights_TK, row_of_TK)
        scale_R = ops.gather_values(weights_TK.reshape(-1), source_of_R)
        return ops.gather_rows(x_TD, token_of_R, scale_R)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, row_of_TK = ctx.saved_tensors
        drows_RD = drows_RD.contiguous()
        if weights_TK is None:
            return ctx.ops.gather_sum(drows_RD, row_of_TK), None, None, None, None
        dx_TD = ctx.ops.gather_sum(drows_RD, row_of_TK, weights_TK)
        dweights_TK = ctx.ops.gather_dot(drows_RD, row_of_TK, x_TD).to(weights_TK.dtype)
        return dx_TD, dweights_TK, None, None, None


class _Combine(torch.autograd.Function):
    """Sum the rows of each token into y[t], weighted if weights are given; the adjoint of `_Dispatch`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_TK: Tensor | None,
        row_of_TK: Tensor,
        source_of_R: Tensor,
        ops: Any,
    ) -> Tensor:
        ctx.ops, ctx.top_k = ops, row_of_TK.shape[1]
        if weights_TK is None:
            ctx.save_for_backward(None, None, None, source_of_R)
            return ops.gather_sum(rows_RD, row_of_TK)
        ctx.save_for_backward(rows_RD, weights_TK, row_of_TK, source_of_R)
        return ops.gather_sum(rows_RD, row_of_TK, weights_TK)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK, row_of_TK, source_of_R = ctx.saved_tensors
        dy_TD, token_of_R = dy_TD.contiguous(), token_of(source_of_R, ctx.top_k)
        if weights_TK is None:
            return ctx.ops.gather_rows(dy_TD, token_of_R), None, None, None, None
        scale_R = ctx.ops.gather_values(weights_TK.reshape(-1), source_of_R)
        drows_RD = ctx.ops.gather_rows(dy_TD, token_of_R, scale_R)
        dweights_TK = ctx.ops.gather_dot(rows_RD, row_of_TK, dy_TD).to(weights_TK.dtype)
        return drows_RD, dweights_TK, None, None, None
