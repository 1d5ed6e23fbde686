"""The experts' feed-forward one expert after the other, for CPUs: what an expert touches stays in cache.

Rows are gathered where they are multiplied, h's gradient lives for one expert at a time, and every product
is written straight into its place. The same function as `ffn_by_products`, which is its oracle. N rows
of a source, D model_dim, H hidden_dim, E experts, R rows (n of one expert).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels import team
from fairseq_tutel.kernels.activations import ACTIVATIONS, Activation
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import FFNGradients, FFNWeights, Kept


def ffn_forward(
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Kept]:
    """Return every row's output [R, D] and what backward needs; see `ffn_by_products.ffn_forward`."""
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    y_RD = x_ND.new_empty(num_rows, weights.fc2_weight.shape[1])
    kept = _up(x_ND, index_R, weights, groups, activation, keep, y_RD)
    clear_tail(y_RD, groups)
    return y_RD, kept


def ffn_kept(
    x_ND: Tensor, index_R: Tensor | None, weights: FFNWeights, groups: Groups, activation: str
) -> Kept:
    """Return what backward needs alone; see `ffn_by_products.ffn_kept`."""
    return _up(x_ND, index_R, weights, groups, activation, True, None)


def _up(
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
    y_RD: Tensor | None,
) -> Kept:
    """Write every row's output into y_RD, where that is wanted, and return what backward needs."""
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    hidden_dim = weights.fc1_weight.shape[1]
    kind = ACTIVATIONS["swish" if weights.is_glu else activation]
    h_RH = x_ND.new_empty(num_rows, hidden_dim) if keep else None
    g_RH = x_ND.new_empty(num_rows, hidden_dim) if keep and weights.is_glu else None
    counts = groups.host
    y_n, h_n, g_n = (_split(rows, counts) for rows in (y_RD, h_RH, g_RH))
    own_of = weights.getter()

    def worker() -> Callable[[int], None]:
        x_of = _reader(x_ND, index_R, counts)

        def run(e: int) -> None:
            if counts[e] == 0:  # most experts, where one token is decoded
                return
            own, x_nD = own_of(e), x_of(e)
            a_nH = kind.forward(linear(x_nD, own.fc1_weight, own.fc1_bias, h_n[e]))
            if own.fc3_weight is not None:
                a_nH = a_nH.mul_(linear(x_nD, own.fc3_weight, own.fc3_bias, g_n[e]))
            if y_n[e] is not None:
                linear(a_nH, own.fc2_weight, own.fc2_bias, y_n[e])

        return run

    team.for_each(worker, counts, x_ND.shape[1] * hidden_dim)
    if weights.is_glu or not kind.keeps_output:
        return Kept(h_RH=h_RH, g_RH=g_RH)
    return Kept(a_RH=h_RH)  # the activation was in place


def ffn_backward(
    dy_ND: Tensor,
    x_ND: Tensor,
    index_R: Tensor | None,
    gate_R: Tensor | None,
    weights: FFNWeights,
    kept: Kept,
    groups: Groups,
    activation: str,
    needs_dx: bool,
    needs_weights: bool,
) -> FFNGradients:
    """Return all gradients; see `ffn_by_products.ffn_backward`."""
    counts = groups.host
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    kind = ACTIVATIONS["swish" if weights.is_glu else activation]
    grads = FFNGradients.empty_like(weights, num_rows, gate_R, needs_dx, needs_weights)
    gate_n, dgate_n, dx_n, a_n, h_n, g_n = (
        _split(rows, counts)
        for rows in (gate_R, grads.gate_R, grads.x_RD, kept.a_RH, kept.h_RH, kept.g_RH)
    )
    experts = list(weights.by_expert())
    outs = [None] * len(counts) if grads.weights is None else list(grads.weights.by_expert())
    hidden_dim = weights.fc1_weight.shape[1]

    def worker() -> Callable[[int], None]:
        dy_of, x_of = _reader(dy_ND, index_R, counts), _reader(x_ND, index_R, counts)
        place_nH = dy_ND.new_empty(max(counts), hidden_dim)

        def run(e: int) -> None:
            own, out, dy_nD, x_nD = experts[e], outs[e], dy_of(e), x_of(e)
            a_nH, h_nH, g_nH = _hidden(kind, a_n[e], h_n[e], g_n[e])
            da_nH = torch.mm(dy_nD, own.fc2_weight, out=place_nH[: counts[e]])
            if gate_n[e] is not None:
                dgate_n[e].copy_(torch.linalg.vecdot(da_nH, a_nH))
                if own.fc2_bias is not None:
                    dgate_n[e].add_(dy_nD @ own.fc2_bias)
                gate_n1 = gate_n[e].unsqueeze(1).to(dy_nD.dtype)
                da_nH.mul_(gate_n1)
                dy_nD.mul_(gate_n1)  # a gathered copy, as gates come with an index
            if out is not None:
                _outer(dy_nD, a_nH, out.fc2_weight, out.fc2_bias)
            dg_nH = None
            if g_nH is not None:
                dg_nH = F.silu(h_nH).mul_(da_nH)
                da_nH.mul_(g_nH)
            dh_nH = kind.backward(da_nH, a_nH if h_nH is None else h_nH)
            if out is not None:
                _outer(dh_nH, x_nD, out.fc1_weight, out.fc1_bias)
                if dg_nH is not None:
                    _outer(dg_nH, x_nD, out.fc3_weight, out.fc3_bias)
            if dx_n[e] is not None:
                torch.mm(dh_nH, own.fc1_weight, out=dx_n[e])
                if dg_nH is not None:
                    dx_n[e].addmm_(dg_nH, own.fc3_weight)

        return run

    team.for_each(worker, counts, x_ND.shape[1] * hidden_dim)
    if grads.x_RD is not None:
        clear_tail(grads.x_RD, groups)
    return grads


def _hidden(
    kind: Activation, a_nH: Tensor | None, h_nH: Any, g_nH: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """Return (a, h, g) of one expert, with a made of the others where it was not kept."""
    if a_nH is None:
        a_nH = kind.forward(h_nH)
        if g_nH is not None:
            a_nH = a_nH.mul_(g_nH)
    return a_nH, h_nH, g_nH


def _reader(x_ND: Tensor, index_R: Tensor | None, counts: Sequence[int]) -> Callable[[int], Tensor]:
    """Return what reads the rows of an expert, each time into the same place, which is in cache."""
    parts = _split(x_ND if index_R is None else index_R, counts)
    if index_R is None:
        return parts.__getitem__
    place_nD = x_ND.new_empty(max(counts), x_ND.shape[1])
    return lambda e: torch.index_select(x_ND, 0, parts[e], out=place_nD[: counts[e]])


def _split(rows: Tensor | None, counts: Sequence[int]) -> Sequence[Any]:
    """Return the groups' rows, without the tail; None for each where there are none."""
    if rows is None:
        return [None] * len(counts)
    used = sum(counts)
    return (rows if used == rows.shape[0] else rows[:used]).split(list(counts))


def linear(
    rows_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_nO: Tensor | None
) -> Tensor:
    """Return rows @ weight.T + bias, written into `out_nO` where that is given."""
    if out_nO is None:  # made here, so that the same product gives the same bits, kept or not
        out_nO = rows_nI.new_empty(len(rows_nI), len(weight_OI))
    if bias_O is None:
        return torch.mm(rows_nI, weight_OI.t(), out=out_nO)
    return torch.addmm(bias_O, rows_nI, weight_OI.t(), out=out_nO)


def _outer(dout_nO: Tensor, rows_nI: Tensor, dweight_OI: Any, dbias_O: Tensor | None) -> None:
    torch.mm(dout_nO.t(), rows_nI, out=dweight_OI)
    if dbias_O is None:
        return
    if dout_nO.dtype in (torch.float32, torch.float64):
        # A product with ones takes a third of the time of a sum over dimension 0.
        torch.mv(dout_nO.t(), dout_nO.new_ones(len(dout_nO)), out=dbias_O)
    else:
        torch.sum(dout_nO, dim=0, out=dbias_O)


def clear_tail(rows: Tensor, groups: Groups) -> Tensor:
    """Return the rows, those behind the last group set to 0."""
    used = sum(groups.host)
    if used < rows.shape[0]:
        rows[used:] = 0
    return rows
