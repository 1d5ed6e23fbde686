"""The floor: the bare operations that a layer needs on a CPU, in one autograd node.

It has the gate, softmax, top-k, a sort of the assignments, for each expert gathers, products and the
activation, and the sums of a token's rows. It has no options, padding, capacity, losses, metrics or checks.
A single token without gradients runs just the gate and its experts. The products have the forms that this
project found to be fastest.

T tokens, D model_dim, H hidden_dim, E experts, K top_k, R = T * K rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.variant import Unsupported, Variant
from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.kernels.products import linear, weight_grad
from fairseq_tutel.kernels.reference_route import softmax_top_k, softmax_top_k_backward


class Bare(Variant):
    """A layer with relu experts without biases."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.top_k = case.top_k

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        if len(x_TD) == 1 and not torch.is_grad_enabled():
            return self._of_one(x_TD)
        return bare_moe(x_TD, self.gate, self.fc1, self.fc2, self.top_k)

    def _of_one(self, x_1D: Tensor) -> Tensor:
        _, ids_1K, weights_1K = softmax_top_k(F.linear(x_1D, self.gate), self.top_k, self.top_k > 1)
        of_each = [
            ffn_of_few(x_1D, {"fc1_weight": self.fc1[e], "fc2_weight": self.fc2[e]}, "relu")
            for e in ids_1K[0].tolist()
        ]
        return weights_1K @ torch.cat(of_each)


def bare_moe(x_TD: Tensor, gate_ED: Tensor, fc1_EHD: Tensor, fc2_EDH: Tensor, top_k: int) -> Tensor:
    """Return y_TD of a layer with relu experts."""
    return _Bare.apply(x_TD, gate_ED, fc1_EHD, fc2_EDH, top_k)


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate: Tensor, fc1: Tensor, fc2: Tensor, top_k: int) -> Tensor:
        probs_TE, ids_TK, weights_TK = softmax_top_k(F.linear(x_TD, gate), top_k, top_k > 1)
        ids_N = ids_TK.flatten()
        order_R = ids_N.sort(stable=True).indices
        row_of_TK = (
            torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R))).view_as(ids_TK)
        )
        token_R, counts = order_R // top_k, torch.bincount(ids_N, minlength=len(fc1)).tolist()
        a_RH, y_RD = x_TD.new_empty(len(order_R), fc1.shape[1]), x_TD.new_empty(len(order_R), fc2.shape[1])
        parts = zip(*(each.split(counts) for each in (token_R, a_RH, y_RD)), strict=True)
        for e, (token, a, y) in enumerate(parts):
            if len(token):
                linear(linear(x_TD.index_select(0, token), fc1[e], None, a).relu_(), fc2[e], None, y)
        ctx.counts = counts
        ctx.save_for_backward(
            x_TD, gate, fc1, fc2, probs_TE, ids_TK, weights_TK, order_R, token_R, row_of_TK, a_RH
        )
        return F.embedding_bag(row_of_TK, y_RD, mode="sum", per_sample_weights=weights_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate, fc1, fc2, probs_TE, ids_TK, weights_TK, order_R, token_R, row_of_TK, a_RH = (
            ctx.saved_tensors
        )
        dfc1, dfc2 = (torch.empty_like(each) for each in (fc1, fc2))
        scale_R, dscale_R = weights_TK.flatten()[order_R].unsqueeze(1), weights_TK.new_empty(len(order_R))
        dx_RD = x_TD.new_empty(len(order_R), x_TD.shape[1])
        place_RH = torch.empty_like(a_RH[: max(ctx.counts)])
        rows = token_R, scale_R, dscale_R, a_RH, dx_RD
        parts = zip(*(each.split(ctx.counts) for each in rows), strict=True)
        for e, (token, scale, dscale, a, dx) in enumerate(parts):
            if len(token) == 0:
                dfc1[e].zero_(), dfc2[e].zero_()
                continue
            x, dy = x_TD.index_select(0, token), dy_TD.index_select(0, token)
            da = torch.mm(dy, fc2[e], out=place_RH[: len(a)])
            dscale.copy_(torch.linalg.vecdot(da, a))
            weight_grad(dy.mul_(scale), a, dfc2[e], None)
            torch.ops.aten.threshold_backward.grad_input(da.mul_(scale), a, 0, grad_input=da)
            weight_grad(da, x, dfc1[e], None)
            torch.mm(da, fc1[e], out=dx)
        dweights_TK = dscale_R[row_of_TK]
        normalize = ids_TK.shape[1] > 1
        dlogits_TE = softmax_top_k_backward(probs_TE, ids_TK, None, dweights_TK, normalize)
        dx_TD = F.embedding_bag(row_of_TK, dx_RD, mode="sum").addmm_(dlogits_TE, gate)
        return dx_TD, dlogits_TE.t() @ x_TD, dfc1, dfc2, None


def build(case: Case, inputs: Inputs) -> Bare:
    """Return it.

    Raises:
        Unsupported: another device, dtype or activation.
    """
    if inputs.x_TD.device.type != "cpu" or inputs.x_TD.dtype != torch.float32 or case.activation != "relu":
        raise Unsupported("the bare operations are written for relu in fp32 on a CPU")
    return Bare(case, inputs)
