"""The products of experts by torch's own F.grouped_mm, with the signatures of `reference`.

A backend to compare with, and where it is the faster one to choose: fp32, fp16 and bf16, whose matrices'
rows are multiples of 16 bytes. Nothing is fused; rows are gathered first. A tail behind the last group
is reckoned to the last expert: it is read as zero, and zero stays zero through every map and activation.
E experts, R rows, N rows of a source, D model_dim, H hidden_dim, I and O what a map reads and gives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import opaque

ROW_BYTES = 16  # that the rows of every matrix are multiples of


def _shape(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(ends_E), a.shape[0], b.shape[1])
    return a.new_empty(shape)


@opaque(_shape)  # whose own fake implementation takes bf16 alone
def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return F.grouped_mm(a, b, offs=ends)."""
    return F.grouped_mm(a, b, offs=ends_E)


def grouped_linear(
    rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups
) -> Tensor:
    """Return out_RO; see `reference.grouped_linear`. Its tail is 0 where that of rows is."""
    _check(rows_RI, weight_EOI)
    if rows_RI.shape[0] == 0:
        return rows_RI.new_zeros(0, weight_EOI.shape[1])
    out_RO = grouped_mm(rows_RI, weight_EOI.mT, _ends(groups, rows_RI))
    return out_RO if bias_EO is None else out_RO.add_(_of_rows(bias_EO, groups, rows_RI))


def grouped_weight_grad(
    dout_NO: Tensor,
    rows_NI: Tensor,
    groups: Groups,
    *,
    dout_index_R: Tensor | None = None,
    rows_index_R: Tensor | None = None,
    scale_R: Tensor | None = None,
    bias: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (dweight_EOI, dbias_EO); see `reference.grouped_weight_grad`."""
    _check(dout_NO, rows_NI)
    dout_RO = _gathered(dout_NO, dout_index_R)
    rows_RI = _gathered(rows_NI, rows_index_R)
    if scale_R is not None:
        if dout_index_R is not None:
            scale_R = scale_R.masked_fill(dout_index_R < 0, 0.0)
        dout_RO = dout_RO * scale_R.unsqueeze(1).to(dout_RO.dtype)
    num_experts = len(groups.counts)
    if dout_RO.shape[0] == 0:
        dweight_EOI = dout_RO.new_zeros(num_experts, dout_RO.shape[1], rows_RI.shape[1])
        return dweight_EOI, dout_RO.new_zeros(num_experts, dout_RO.shape[1]) if bias else None
    dweight_EOI = _sums(dout_RO, rows_RI, groups)
    if not bias:
        return dweight_EOI, None
    # A product with ones, of as few columns as there may be: no atomics, the same bits every run.
    ones = dout_RO.new_ones(dout_RO.shape[0], ROW_BYTES // dout_RO.element_size())
    return dweight_EOI, _sums(dout_RO, ones, groups)[:, :, 0].contiguous()


def _sums(dout_RO: Tensor, rows_RI: Tensor, groups: Groups) -> Tensor:
    """Return dout.T @ rows of every group [E, O, I], 0 for an empty one; nothing of the tail is in it.

    Some GPUs' kernels leave there what lay in memory (pytorch/pytorch issue 172439, pull request 174314).
    """
    ends_E = groups.counts.cumsum(0, dtype=torch.int32)  # without the tail
    sums_EOI = grouped_mm(dout_RO.t(), rows_RI, ends_E)
    if dout_RO.is_cpu and 0 not in groups.host:  # a GPU would have to be asked
        return sums_EOI
    return sums_EOI.masked_fill_((groups.counts == 0).view(-1, 1, 1), 0.0)


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
    """Return (a_RH, h_RH, g_RH); see `reference.ffn_up`."""
    kind, x_RD = ACTIVATIONS[activation], _gathered(x_ND, index_R)
    h_RH = grouped_linear(x_RD, fc1_weight, fc1_bias, groups)
    if fc3_weight is not None:
        g_RH = grouped_linear(x_RD, fc3_weight, fc3_bias, groups)
        a_RH = F.silu(h_RH).mul_(g_RH)
        return (a_RH, h_RH, g_RH) if keep else (a_RH, None, None)
    a_RH = kind.forward(h_RH)
    return a_RH, h_RH if keep and not kind.keeps_output else None, None


def ffn_down_backward(
    dy_ND: Tensor,
    index_R: Tensor | None,
    gate_R: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    a_RH: Tensor | None,
    h_RH: Tensor | None,
    g_RH: Tensor | None,
    groups: Groups,
    activation: str,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return (dh_RH, dg_RH, a_RH, dgate_R); see `reference.ffn_down_backward`."""
    kind, dy_RD = ACTIVATIONS[activation], _gathered(dy_ND, index_R)
    da_RH = grouped_linear(dy_RD, fc2_weight.mT, None, groups)
    if a_RH is None:
        assert h_RH is not None
        a_RH = kind.forward(h_RH) if g_RH is None else F.silu(h_RH).mul_(g_RH)
    dgate_R = None
    if gate_R is not None and index_R is not None:
        dots_R = torch.linalg.vecdot(da_RH, a_RH)
        if fc2_bias is not None:
            dots_R = dots_R + torch.linalg.vecdot(dy_RD, _of_rows(fc2_bias, groups, dy_RD))
        dgate_R = dots_R.to(gate_R.dtype)
        da_RH.mul_(gate_R.masked_fill(index_R < 0, 0.0).unsqueeze(1).to(da_RH.dtype))
    if g_RH is None:
        return kind.backward(da_RH, a_RH if h_RH is None else h_RH), None, a_RH, dgate_R
    assert h_RH is not None
    dg_RH = F.silu(h_RH).mul_(da_RH)
    dh_RH = ACTIVATIONS["swish"].backward(da_RH.mul_(g_RH), h_RH)
    return dh_RH, dg_RH, a_RH, dgate_R


def ffn_up_backward(
    dh_RH: Tensor,
    fc1_weight: Tensor,
    dg_RH: Tensor | None,
    fc3_weight: Tensor | None,
    groups: Groups,
) -> Tensor:
    """Return dx_RD; see `reference.ffn_up_backward`."""
    dx_RD = grouped_linear(dh_RH, fc1_weight.mT, None, groups)
    if dg_RH is not None and fc3_weight is not None:
        dx_RD += grouped_linear(dg_RH, fc3_weight.mT, None, groups)
    return dx_RD


def _check(*operands: Tensor) -> None:
    for operand in operands:
        if operand.dtype == torch.float64:
            raise ValueError(
                "backend (--moe-backend) is 'grouped_mm', which takes fp32, fp16 and bf16 but no fp64; "
                "choose auto or reference."
            )
        for width in operand.shape[1:]:
            size = width * operand.element_size()
            if size % ROW_BYTES:
                raise ValueError(
                    "backend (--moe-backend) is 'grouped_mm', which takes rows of whole 16 bytes; a row "
                    f"of {width} numbers in {operand.dtype}, of a model, an expert or a slice of one, is "
                    f"{size} bytes; give dimensions that are multiples of 8, or choose auto."
                )


def _ends(groups: Groups, rows_RX: Tensor) -> Tensor:
    """Return where each group ends, as grouped_mm wants it, the last at R."""
    ends_E = groups.counts.cumsum(0, dtype=torch.int32)
    ends_E[-1] = rows_RX.shape[0]
    return ends_E


def _expert_of_rows(groups: Groups, rows_RX: Tensor) -> Tensor:
    """Return the expert of every row; E in the tail."""
    rows_R = torch.arange(rows_RX.shape[0], device=rows_RX.device)
    return torch.searchsorted(groups.counts.cumsum(0), rows_R, right=True)


def _of_rows(values_EX: Tensor, groups: Groups, rows_RX: Tensor) -> Tensor:
    """Return every row's own expert's values; 0 in the tail."""
    return F.pad(values_EX, (0, 0, 0, 1)).index_select(0, _expert_of_rows(groups, rows_RX))


def _gathered(rows_NX: Tensor, index_R: Tensor | None) -> Tensor:
    if index_R is None:
        return rows_NX
    if rows_NX.shape[0] == 0:
        return rows_NX.new_zeros(index_R.shape[0], rows_NX.shape[1])
    rows_RX = rows_NX.index_select(0, index_R.clamp_min(0))
    return rows_RX.masked_fill_((index_R < 0).unsqueeze(1), 0.0)
