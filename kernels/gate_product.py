"""The gate's product of bf16 tokens and bf16 weights, with fp32 results and no fp32 copies of its operands.

Products of bf16 numbers are exact in fp32, so the logits differ from the product of fp32 copies only in the
rounding of the sums. T tokens, D model_dim, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.reference_route import in_pairs


def is_supported(x_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return whether `product` can replace the product of fp32 copies: bf16 operands on an NVIDIA GPU."""
    return (
        x_TD.dtype == weight_ED.dtype == torch.bfloat16
        and x_TD.is_cuda
        and torch.version.hip is None
        and hasattr(torch.ops.aten.mm, "dtype")  # since torch 2.8
    )


def product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight.T in fp32 for bf16 operands, differentiable once.

    Backward splits the gradient of the logits into a bf16 number and the bf16 rest, which together have 16
    bits. With one bf16 number, rounding errors would remain where a softmax gradient cancels.
    """
    return _Product.apply(x_TD, weight_ED)


def choice(
    x_TD: Tensor, weight_ED: Tensor, top_k: int, ops: Any, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, `product` and the results of softmax_top_k on it, as one autograd node.

    The gate's part of x's gradient is added to the gradient of the returned x in the same product, so only
    functions whose backward returns a new tensor may read the returned x.
    """
    return _Choice.apply(x_TD, weight_ED, top_k, ops, normalize)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _in_fp32(x_TD, weight_ED.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED = ctx.saved_tensors
        pair_TF = in_pairs(dlogits_TE, weight_ED.dtype)
        return _gradients(ctx, None, x_TD, pair_TF, torch.cat((weight_ED, weight_ED)))


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ED: Tensor, top_k: int, ops: Any, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        logits_TE = _in_fp32(x_TD, weight_ED.t())
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k, normalize)
        ctx.save_for_backward(x_TD, weight_ED, probs_TE, ids_TK)
        ctx.mark_non_differentiable(*((ids_TK,) if ctx.needs_input_grad[0] else (ids_TK, x_TD)))
        ctx.set_materialize_grads(False)
        ctx.ops, ctx.normalize = ops, normalize
        return x_TD, logits_TE, probs_TE, ids_TK, weights_TK

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dx_TD: Tensor | None, dlogits_TE: Any, dprobs_TE: Any, _: None, dweights_TK: Any
    ) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED, probs_TE, ids_TK = ctx.saved_tensors
        given = probs_TE, ids_TK, dprobs_TE, dweights_TK, ctx.normalize
        if dlogits_TE is None:
            factors = ctx.ops.gate_backward(*given, weight_ED)
        else:  # a balance loss reads the logits
            dlogits_TE = dlogits_TE + ctx.ops.softmax_top_k_backward(*given)
            factors = in_pairs(dlogits_TE, weight_ED.dtype), torch.cat((weight_ED, weight_ED))
        return *_gradients(ctx, dx_TD, x_TD, *factors), None, None, None


def _gradients(
    ctx: Any, dx_TD: Tensor | None, x_TD: Tensor, pair_TF: Tensor, twice_FD: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and the gate's weight; x's is added to `dx_TD` if that is given."""
    dweight_ED = None
    if ctx.needs_input_grad[0]:
        dx_TD = torch.mm(pair_TF, twice_FD) if dx_TD is None else dx_TD.addmm_(pair_TF, twice_FD)
    if ctx.needs_input_grad[1]:
        both_FD = _in_fp32(pair_TF.t(), x_TD)
        halves = both_FD.split(both_FD.shape[0] // 2)
        dweight_ED = torch.add(*halves, out=x_TD.new_empty(halves[0].shape))
    return dx_TD, dweight_ED


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with fp32 sums and results. On a CPU, which tests use, from fp32 copies."""
    if a.device.type == "cpu":
        return torch.mm(a.float(), b.float())
    return torch.mm(a, b, out_dtype=torch.float32)
