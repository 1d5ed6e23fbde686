"""The FFN of all experts on a GPU, computed as grouped matrix products with one kernel launch each.

N source rows, D model_dim, H hidden_dim, E experts, R rows.
"""

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import FFNGradients, FFNWeights, SavedActivations


def by_products(ops: dict[str, Any]) -> SimpleNamespace:
    """Return a namespace with the given kernels, and with FFN functions that call these kernels."""
    whole = SimpleNamespace(**ops)
    for function in (ffn_forward, ffn_activations, ffn_backward):
        setattr(whole, function.__name__, functools.partial(function, whole))
    return whole


def ffn_forward(
    ops: Any,
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
) -> tuple[Tensor, SavedActivations]:
    """Return the FFN output of every row [R, D], and the activations that backward needs.

    The rows after the last group (the tail) have output 0.

    Args:
        ops: a namespace with ffn_up and grouped_linear.
        x_ND: [R, D], or [N, D] if `index_R` gives each row's source.
        index_R: [R] int64, each row's index in x, or -1 in the tail.
        weights: the experts' weights, in x's dtype.
        groups: the number of rows of each expert.
        activation: a name in ACTIVATIONS; gated experts ignore it.
        keep: whether to save activations for backward.
    """
    a_RH, saved = _up(ops, x_ND, index_R, weights, groups, activation, keep)
    return ops.grouped_linear(a_RH, weights.fc2_weight, weights.fc2_bias, groups), saved


def ffn_activations(
    ops: Any, x_ND: Tensor, index_R: Tensor | None, weights: FFNWeights, groups: Groups, activation: str
) -> SavedActivations:
    """Compute the activations that backward needs, if forward did not save the activations."""
    return _up(ops, x_ND, index_R, weights, groups, activation, True)[1]


def _up(
    ops: Any,
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
) -> tuple[Tensor, SavedActivations]:
    """Return the input of the FFN's second linear map (fc2), and the activations for backward."""
    w = weights
    a_RH, h_RH, g_RH = ops.ffn_up(
        x_ND, index_R, w.fc1_weight, w.fc1_bias, w.fc3_weight, w.fc3_bias, groups, activation, keep
    )
    return a_RH, SavedActivations(a_RH if keep and h_RH is None else None, h_RH, g_RH)


def ffn_backward(
    ops: Any,
    dy_ND: Tensor,
    x_ND: Tensor,
    index_R: Tensor | None,
    gate_N: Tensor | None,
    source_R: Tensor | None,
    weights: FFNWeights,
    saved: SavedActivations,
    groups: Groups,
    activation: str,
    needs_dx: bool,
    needs_weights: bool,
) -> FFNGradients:
    """Return the gradients of the FFN's input rows, gate weights and expert weights.

    Args:
        ops: a namespace with gather_pair, ffn_down_backward, ffn_up_backward and grouped_weight_grad.
        dy_ND: without gates, the gradient of the rows' outputs [R, D]. With gates, the gradient of y
            [N, D]: y[n] sums gate[source[r]] times the output of row r over all rows r with index[r] = n.
        x_ND: as in forward.
        index_R: as in forward; required with gates.
        gate_N: gate weights, in dy's dtype or wider, or None.
        source_R: [R] int64, each row's index in gate; not read in the tail; None without gates.
        weights: as in forward.
        saved: the activations that forward saved.
        groups: as in forward.
        activation: as in forward.
        needs_dx: whether to compute the gradient of x's rows.
        needs_weights: whether to compute the gradients of the weights.
    """
    w = weights
    # Products of contiguous rows gain more time than these copies take.
    x_RD, dy_RD = x_ND, dy_ND
    if index_R is not None and needs_weights:
        x_RD, dy_RD = ops.gather_pair(x_ND, dy_ND, index_R)
    elif index_R is not None:
        dy_RD = ops.gather_rows(dy_ND, index_R)
    dh_RH, dg_RH, gated_RH, dgate_PR = ops.ffn_down_backward(
        dy_RD,
        gate_N,
        source_R,
        w.fc2_weight,
        w.fc2_bias,
        saved.a_RH,
        saved.h_RH,
        saved.g_RH,
        groups,
        activation,
    )
    of_weights = None
    if needs_weights:
        dw2, db2 = ops.grouped_weight_grad(
            dy_RD, gated_RH, groups, bias=w.fc2_bias is not None, bias_scale_N=gate_N,
            bias_source_R=source_R,
        )  # fmt: skip
        dw1, db1 = ops.grouped_weight_grad(dh_RH, x_RD, groups, bias=w.fc1_bias is not None)
        dw3 = db3 = None
        if dg_RH is not None:
            dw3, db3 = ops.grouped_weight_grad(dg_RH, x_RD, groups, bias=w.fc3_bias is not None)
        of_weights = FFNWeights(dw1, db1, dw2, db2, dw3, db3)
    del x_RD, dy_RD, gated_RH  # dx_RD can use their memory
    dx_RD = ops.ffn_up_backward(dh_RH, w.fc1_weight, dg_RH, w.fc3_weight, groups) if needs_dx else None
    return FFNGradients(dx_RD, dgate_PR, of_weights)
