"""Every op in Triton, under the names of `OPS`: what `kernels.ops` returns for a GPU."""

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

__all__ = [
    "assign_slots",
    "assign_slots_by",
    "ffn_down_backward",
    "ffn_up",
    "ffn_up_backward",
    "gather_dot",
    "gather_rows",
    "gather_sum",
    "grouped_linear",
    "grouped_weight_grad",
    "softmax_top_k",
    "softmax_top_k_backward",
    "stride_copy",
]
