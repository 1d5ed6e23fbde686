"""The Triton version of every kernel, which `kernels.ops` returns for a GPU."""

from types import SimpleNamespace

from fairseq_tutel.kernels import reference
from fairseq_tutel.kernels.ffn_by_products import by_products
from fairseq_tutel.kernels.triton_copy import stride_copy
from fairseq_tutel.kernels.triton_dispatch import gather_dot, gather_rows, gather_sum
from fairseq_tutel.kernels.triton_gemm import ffn_up_backward, grouped_linear
from fairseq_tutel.kernels.triton_hidden import ffn_down_backward
from fairseq_tutel.kernels.triton_route import (
    assign_slots,
    assign_slots_by,
    softmax_top_k,
    softmax_top_k_backward,
)
from fairseq_tutel.kernels.triton_up import ffn_up
from fairseq_tutel.kernels.triton_weight_grad import grouped_weight_grad

_OTHERS = {
    "assign_slots": assign_slots,
    "assign_slots_by": assign_slots_by,
    "gather_dot": gather_dot,
    "gather_rows": gather_rows,
    "gather_sum": gather_sum,
    "softmax_top_k": softmax_top_k,
    "softmax_top_k_backward": softmax_top_k_backward,
    "stride_copy": stride_copy,
}
_PRODUCTS = {
    "ffn_down_backward": ffn_down_backward,
    "ffn_up": ffn_up,
    "ffn_up_backward": ffn_up_backward,
    "grouped_linear": grouped_linear,
    "grouped_weight_grad": grouped_weight_grad,
}
BY_PRODUCTS = by_products({**_OTHERS, **_PRODUCTS})
# The Triton products do not support fp64 on a GPU, so torch computes fp64 products expert by expert.
IN_FP64 = SimpleNamespace(**{**vars(reference), **_OTHERS})
