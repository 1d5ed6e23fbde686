"""All kernels in plain torch. CPUs use these functions, and tests compare Triton kernels with them.

T tokens, D model_dim, K top_k, R rows, N source rows, E experts, H hidden_dim, I and O the input and output
dimensions of a linear map. An index of -1 marks an empty row, which is read as zero. Rows are sorted by
expert, and group e is the rows of expert e. The tail is the rows after the last group, which belong to no
expert.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.ffn_by_expert import clear_tail, ffn_activations, ffn_backward, ffn_forward
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.products import linear
from fairseq_tutel.kernels.reference_route import assign_rows as assign_rows
from fairseq_tutel.kernels.reference_route import load_loss as load_loss
from fairseq_tutel.kernels.reference_route import softmax_top_k as softmax_top_k
from fairseq_tutel.kernels.reference_route import softmax_top_k_backward as softmax_top_k_backward
from fairseq_tutel.kernels.reference_route import token_sums as token_sums

# For these dtypes, torch's embedding_bag sums rows without copying every row.
BAG_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

__all__ = ["ffn_activations", "ffn_backward", "ffn_forward"]  # re-exported


def gather_rows(x_TD: Tensor, index_R: Tensor, scale_R: Tensor | None = None) -> Tensor:
    """Gather rows: rows[r] = scale[r] * x[index[r]], or 0 where index[r] is -1.

    Args:
        x_TD: [T, D], any float dtype.
        index_R: [R] int64 in -1 .. T - 1.
        scale_R: [R], or None for factors of 1. If index[r] is -1, scale[r] has no effect.
    """
    if len(x_TD) == 0:
        return x_TD.new_zeros(len(index_R), x_TD.shape[1])
    holes_R1 = (index_R < 0).unsqueeze(1)
    has_holes = index_R.device.type != "cpu" or bool(holes_R1.any())  # on a GPU, any() would synchronize
    rows_RD = x_TD.index_select(0, index_R.clamp_min(0) if has_holes else index_R)
    if scale_R is not None:
        rows_RD.mul_(scale_R.unsqueeze(1).to(rows_RD.dtype))
    return rows_RD.masked_fill_(holes_R1, 0.0) if has_holes else rows_RD


def gather_pair(x_TD: Tensor, y_TD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the same rows of two tensors, which have the same shape and dtype; see `gather_rows`."""
    return gather_rows(x_TD, index_R), gather_rows(y_TD, index_R)


def gather_sum(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Sum each token's rows with weights: y[t] = sum over j of weights[t, j] * rows[row_of[t, j]].

    Entries of -1 in `row_of_TK` are skipped.

    Args:
        rows_RD: [R, D], any float dtype.
        row_of_TK: [T, K] int64 in -1 .. R - 1.
        weights_TK: [T, K] in rows' dtype or wider, or None for weights of 1.
    """
    num_tokens, top_k = row_of_TK.shape
    if top_k > 1 and rows_RD.device.type == "cpu" and rows_RD.dtype in BAG_DTYPES and len(rows_RD):
        return _sum_of_bags(rows_RD, row_of_TK, weights_TK)
    copies_ND = gather_rows(rows_RD, row_of_TK.reshape(-1))
    if top_k == 1:
        return copies_ND if weights_TK is None else copies_ND.mul_(weights_TK.to(rows_RD.dtype))
    copies_TKD = copies_ND.view(num_tokens, top_k, rows_RD.shape[1])
    if weights_TK is None:
        return copies_TKD.sum(dim=1)
    # A batched matrix product reads the rows once, and sums half-precision products in fp32.
    return torch.bmm(weights_TK.to(rows_RD.dtype).unsqueeze(1), copies_TKD).squeeze(1)


def _sum_of_bags(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Compute gather_sum on a CPU in one pass, with fp32 sums for half-precision dtypes."""
    # Reading a value on the host would break the graph of torch.compile.
    is_read = len(row_of_TK) > 0 and not torch.compiler.is_compiling()
    if is_read and row_of_TK.amin() >= 0:  # without dropped assignments, every bag has K rows
        weights_TK = None if weights_TK is None else weights_TK.to(rows_RD.dtype)
        return F.embedding_bag(row_of_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)
    kept_TK = row_of_TK >= 0
    ends_T = kept_TK.sum(dim=1).cumsum(0)
    weights_N = None if weights_TK is None else weights_TK.to(rows_RD.dtype)[kept_TK]
    return F.embedding_bag(
        row_of_TK[kept_TK],
        rows_RD,
        F.pad(ends_T, (1, 0)),
        mode="sum",
        per_sample_weights=weights_N,
        include_last_offset=True,
    )


def gather_gradients(drows_RD: Tensor, row_of_TK: Tensor, dgate_PR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens (sums over rows) and of gate weights (sums over dgate's P parts).

    For an entry of -1 in `row_of_TK`, the summand and the gradient of the gate weight are 0.

    Args:
        drows_RD: [R, D], any float dtype.
        row_of_TK: [T, K] int64 in -1 .. R - 1.
        dgate_PR: [P, R] fp32 or fp64, P parts whose sum is the gradient of each row's gate weight.
    """
    dgate_R = dgate_PR[0] if len(dgate_PR) == 1 else dgate_PR.sum(0)
    dweights_N1 = gather_rows(dgate_R.unsqueeze(1), row_of_TK.reshape(-1))
    return gather_sum(drows_RD, row_of_TK), dweights_N1.view(row_of_TK.shape)


def gather_dot(rows_RD: Tensor, row_of_TK: Tensor, y_TD: Tensor) -> Tensor:
    """Compute dot products: dots[t, j] = <y[t], rows[row_of[t, j]]>, or 0 where row_of is -1."""
    copies_TKD = gather_rows(rows_RD, row_of_TK.reshape(-1)).view(*row_of_TK.shape, rows_RD.shape[1])
    return torch.bmm(copies_TKD, y_TD.unsqueeze(2)).squeeze(2)


def grouped_linear(rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups) -> Tensor:
    """Multiply each row of group e by its expert's weight: out[r] = rows[r] @ weight[e].T + bias[e].

    The result is 0 in the rows after the last group.

    Args:
        rows_RI: [R, I], any float dtype.
        weight_EOI: [E, O, I] in rows' dtype, any strides.
        bias_EO: [E, O] in rows' dtype, or None.
        groups: the number of rows of each expert.
    """
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
    for e, own in enumerate(_slices(groups)):
        linear(rows_RI[own], weight_EOI[e], None if bias_EO is None else bias_EO[e], out_RO[own])
    return clear_tail(out_RO, groups)


def grouped_weight_grad(
    dout_RO: Tensor,
    rows_RI: Tensor,
    groups: Groups,
    *,
    bias: bool = False,
    bias_scale_N: Tensor | None = None,
    bias_source_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of each expert's weight and bias, summed over the expert's rows.

    dweight[e] is the sum of the outer products dout[r] x rows[r] over the rows r of expert e.

    Args:
        dout_RO: [R, O].
        rows_RI: [R, I].
        groups: the number of rows of each expert; the gradients of an expert without rows are 0.
        bias: whether to compute dbias[e], the sum of scale[source[r]] * dout[r] over the rows r of expert
            e; otherwise dbias is None.
        bias_scale_N: `scale` in this sum, in dout's dtype or wider; None for factors of 1.
        bias_source_R: `source` in this sum, [R] int64, not read after the last group; None without scale.
    """
    num_experts = len(groups.host)
    dweight_EOI = dout_RO.new_empty(num_experts, dout_RO.shape[1], rows_RI.shape[1])
    dbias_EO = dout_RO.new_empty(num_experts, dout_RO.shape[1]) if bias else None
    for e, own in enumerate(_slices(groups)):
        dout_nO = dout_RO[own]
        torch.mm(dout_nO.t(), rows_RI[own], out=dweight_EOI[e])
        if dbias_EO is not None:
            if bias_scale_N is not None and bias_source_R is not None:
                scale_n = bias_scale_N[bias_source_R[own]]
                dout_nO = dout_nO * scale_n.unsqueeze(1).to(dout_nO.dtype)
            torch.sum(dout_nO, dim=0, out=dbias_EO[e])
    return dweight_EOI, dbias_EO


def ffn_up(
    x_ND: Tensor,
    index_R: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc3_weight: Tensor | None,
    fc3_bias: Tensor | None,
    groups: Groups,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the FFN up to fc2's input: a = act(fc1(x)), or silu(fc1(x)) * fc3(x) for gated experts.

    Returns (a_RH, h_RH, g_RH): h = x @ fc1.T + bias is the activation's input, and g = x @ fc3.T + bias.

    Args:
        x_ND: [R, D], or [N, D] if `index_R` gives each row's source; any float dtype.
        index_R: [R] int64, each row's index in x, or -1 in the tail.
        fc1_weight: [E, H, D] in x's dtype.
        fc1_bias: [E, H] or None.
        fc3_weight: [E, H, D] for gated experts, which ignore `activation`; else None.
        fc3_bias: [E, H] or None.
        groups: the number of rows of each expert. After the last group, a is 0.
        activation: a name in ACTIVATIONS.
        keep: whether to return h and g for backward. If the derivative is computed from a, h is None.
    """
    rows_RD = x_ND if index_R is None else gather_rows(x_ND, index_R)
    h_RH = grouped_linear(rows_RD, fc1_weight, fc1_bias, groups)
    if fc3_weight is None:
        kind = ACTIVATIONS[activation]
        return kind.forward(h_RH.clone()), h_RH if keep and not kind.keeps_output else None, None
    g_RH = grouped_linear(rows_RD, fc3_weight, fc3_bias, groups)
    return F.silu(h_RH) * g_RH, h_RH if keep else None, g_RH if keep else None


def ffn_down_backward(
    dy_RD: Tensor,
    gate_N: Tensor | None,
    source_R: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    a_RH: Tensor | None,
    h_RH: Tensor | None,
    g_RH: Tensor | None,
    groups: Groups,
    activation: str,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Compute the backward pass through the FFN's second linear map (fc2) and the activation.

    Returns (dh_RH, dg_RH, gated_RH, dgate_PR). The forward pass computed y = a @ fc2.T + bias and added
    gate[source[r]] * y[r] to a row of its output, and dy[r] is the gradient of this row. gated[r] is
    gate[source[r]] * a[r], so that fc2's weight gradient is dy.T @ gated. The gradient of a row's gate is
    computed without y: <dy, y> = <dy @ fc2, a> + <dy, bias>. dgate has P parts, whose sum is this gradient.

    Args:
        dy_RD: [R, D].
        gate_N: gate weights, in dy's dtype or wider. None: every gate weight is 1, and dgate is None.
        source_R: [R] int64, each row's index in gate; not read after the last group; None without gate.
        fc2_weight: [E, D, H] in dy's dtype.
        fc2_bias: [E, D] or None.
        a_RH: saved by `ffn_up`; None to recompute it from h and g.
        h_RH: saved by `ffn_up`; None if the derivative is computed from a.
        g_RH: saved by `ffn_up`; None without fc3.
        groups: the number of rows of each expert. After the last group, dh and dg are 0, and gated and
            dgate are undefined.
        activation: a name in ACTIVATIONS.

    The formula of the gate's gradient is from SonicMoE (Guo et al. 2025, arXiv 2512.14080), section 3.
    """
    kind = ACTIVATIONS[activation if g_RH is None else "swish"]
    da_RH = grouped_linear(dy_RD, fc2_weight.mT, None, groups)
    kept_RH = a_RH if h_RH is None else h_RH
    assert kept_RH is not None
    if a_RH is None:
        a_RH = kind.forward(kept_RH.clone())
        a_RH = a_RH if g_RH is None else a_RH * g_RH
    gated_RH, dgate_PR, dg_RH = a_RH, None, None
    if gate_N is not None and source_R is not None:
        gate_R = gather_rows(gate_N.unsqueeze(1), source_R).squeeze(1)
        dgate_R = torch.linalg.vecdot(da_RH, a_RH).to(gate_R.dtype)
        if fc2_bias is not None:
            for e, own in enumerate(_slices(groups)):
                dgate_R[own] += dy_RD[own] @ fc2_bias[e]
        dgate_PR = dgate_R.unsqueeze(0)
        gate_R1 = gate_R.unsqueeze(1).to(da_RH.dtype)
        gated_RH, da_RH = a_RH * gate_R1, da_RH * gate_R1
    if g_RH is not None:
        dg_RH = clear_tail(da_RH * F.silu(kept_RH), groups)
        da_RH = da_RH * g_RH
    return clear_tail(kind.backward(da_RH, kept_RH), groups), dg_RH, gated_RH, dgate_PR


def ffn_up_backward(
    dh_RH: Tensor, fc1_weight: Tensor, dg_RH: Tensor | None, fc3_weight: Tensor | None, groups: Groups
) -> Tensor:
    """Compute the gradient of the FFN's input rows from the gradients of fc1's and fc3's outputs.

    The result is 0 in the rows after the last group.

    Args:
        dh_RH: [R, H].
        fc1_weight: [E, H, D] in dh's dtype.
        dg_RH: [R, H] or None.
        fc3_weight: [E, H, D] or None.
        groups: the number of rows of each expert.
    """
    dx_RD = grouped_linear(dh_RH, fc1_weight.mT, None, groups)
    if dg_RH is not None and fc3_weight is not None:
        dx_RD += grouped_linear(dg_RH, fc3_weight.mT, None, groups)
    return dx_RD


def _slices(groups: Groups) -> list[slice]:
    ends = list(itertools.accumulate(groups.host, initial=0))
    return [slice(first, end) for first, end in itertools.pairwise(ends)]
