"""The gate's product of bf16 tokens and bf16 weights, with fp32 results and no fp32 copies of its operands.

Products of bf16 numbers are exact in fp32, so the logits differ from the product of fp32 copies only in the
rounding of the sums. T tokens, D model_dim, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order


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


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _in_fp32(x_TD, weight_ED.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED = ctx.saved_tensors
        num_experts = weight_ED.shape[0]
        pair_TF = x_TD.new_empty(x_TD.shape[0], 2 * num_experts)
        high_TE, low_TE = pair_TF.split(num_experts, 1)
        high_TE.copy_(dlogits_TE)
        torch.sub(dlogits_TE, high_TE, out=low_TE)
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = torch.mm(pair_TF, torch.cat((weight_ED, weight_ED)))
        if ctx.needs_input_grad[1]:
            both_FD = _in_fp32(pair_TF.t(), x_TD)
            dweight_ED = torch.empty_like(weight_ED)
            torch.add(*both_FD.split(num_experts), out=dweight_ED)
        return dx_TD, dweight_ED


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with fp32 sums and results. On a CPU, which only tests use, multiply fp32 copies."""
    if a.device.type == "cpu":
        return torch.mm(a.float(), b.float())
    return torch.mm(a, b, out_dtype=torch.float32)
