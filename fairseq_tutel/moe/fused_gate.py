"""The commonest gate as one autograd node: softmax over the experts and its K largest, by one kernel.

T tokens, E experts, K top_k.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order


def softmax_top_k(logits_TE: Tensor, top_k: int, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (probs_TE, ids_TK int64, weights_TK): the softmax, its K largest, and their probabilities.

    Args:
        logits_TE: [T, E], any float dtype.
        top_k: K, from 1 to E; ties go to the lower id.
        ops: from `kernels.ops`.
    """
    if torch.is_autocast_enabled(logits_TE.device.type):  # where torch.softmax does the same
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return _SoftmaxTopK.apply(logits_TE, top_k, ops)


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, top_k: int, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k)
        ctx.save_for_backward(probs_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        ctx.ops = ops
        return probs_TE, ids_TK, weights_TK

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dprobs_TE: Tensor | None, _: None, dweights_TK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        probs_TE, ids_TK = ctx.saved_tensors
        if dprobs_TE is None and dweights_TK is None:
            return None, None, None
        return ctx.ops.softmax_top_k_backward(probs_TE, ids_TK, dprobs_TE, dweights_TK), None, None
