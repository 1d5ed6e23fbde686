"""The gate's matrix product of bf16 tokens and bf16 weights, with fp32 logits but no fp32 operands.

The product of two bf16 numbers is exact in fp32. The logits therefore differ from a product of fp32 copies
only in the rounding of the sums. T tokens, D model_dim, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order


def is_supported(x_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return whether `product` supports these operands: they must be bf16 and on an NVIDIA GPU."""
    is_bf16 = x_TD.dtype == weight_ED.dtype == torch.bfloat16
    return is_bf16 and x_TD.is_cuda and torch.version.hip is None


def product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight.T in fp32 for bf16 operands, differentiable once.

    Backward splits the gradient of each logit into a bf16 number and a bf16 remainder, which together have
    16 significant bits. One bf16 number would be too inexact if the terms of a softmax gradient cancel.
    """
    return _Gate.apply(x_TD, weight_ED, 0, None, False)[1]


class _Gate(torch.autograd.Function):
    """Autograd function of the gate: it returns x, the logits, and the results of `softmax_top_k`.

    Backward adds the gate's gradient of x to the gradient of the returned x in place. Therefore the
    returned x may be read only by functions whose backward returns a new tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ED: Tensor, top_k: int, ops: Any, normalize: bool
    ) -> tuple[Tensor | None, ...]:
        logits_TE = _in_fp32(x_TD, weight_ED.t())
        if top_k == 0:  # the caller needs only the logits
            ctx.save_for_backward(x_TD, weight_ED, None, None)
            return None, logits_TE
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k, normalize)
        ctx.save_for_backward(x_TD, weight_ED, probs_TE, ids_TK)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(x_TD)
        ctx.set_materialize_grads(False)
        ctx.ops, ctx.normalize = ops, normalize
        return x_TD, logits_TE, probs_TE, ids_TK, weights_TK

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dx_TD: Any, dlogits_TE: Any, dprobs_TE: Any = None, _: Any = None, dweights_TK: Any = None
    ) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED, probs_TE, ids_TK = ctx.saved_tensors
        if probs_TE is not None:
            given = probs_TE, ids_TK, dprobs_TE, dweights_TK, ctx.normalize
        if dlogits_TE is None:
            pair_TF, twice_FD = ctx.ops.gate_backward(*given, weight_ED)
        else:
            if probs_TE is not None:  # a balance loss has also read the logits
                dlogits_TE = dlogits_TE + ctx.ops.softmax_top_k_backward(*given)
            pair_TF, twice_FD = _in_pairs(dlogits_TE, weight_ED.dtype), torch.cat((weight_ED, weight_ED))
        dweight_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = torch.mm(pair_TF, twice_FD) if dx_TD is None else dx_TD.addmm_(pair_TF, twice_FD)
        if ctx.needs_input_grad[1]:
            both_FD, half = _in_fp32(pair_TF.t(), x_TD), weight_ED.shape[0]
            dweight_ED = torch.add(both_FD[:half], both_FD[half:], out=torch.empty_like(weight_ED))
        return dx_TD, dweight_ED, None, None, None


choice = _Gate.apply  # not wrapped in a Python function, because the additional call would take time


def _in_pairs(dlogits_TE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, 2 E]: the logits' gradients, rounded to `dtype`, and the remainders of the rounding."""
    num_tokens, num_experts = dlogits_TE.shape
    pair_TF = dlogits_TE.new_empty(num_tokens, 2 * num_experts, dtype=dtype)
    high_TE, low_TE = pair_TF.split(num_experts, 1)
    high_TE.copy_(dlogits_TE)
    torch.sub(dlogits_TE, high_TE, out=low_TE)
    return pair_TF


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with fp32 sums and results. On a CPU, where only tests call it, multiply fp32 copies."""
    if a.device.type == "cpu":
        return torch.mm(a.float(), b.float())
    return torch.mm(a, b, out_dtype=torch.float32)
