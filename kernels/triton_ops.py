"""Every op in Triton, under the names of `OPS`: what `kernels.ops` returns for a GPU."""

from fairseq_tutel.kernels.triton_copy import stride_copy
from fairseq_tutel.kernels.triton_dispatch import gather_dot, gather_rows, gather_sum
from fairseq_tutel.kernels.triton_route import (
    assign_slots,
    assign_slots_by,
    softmax_top_k,
    softmax_top_k_backward,
)

__all__ = [
    "assign_slots",
    "assign_slots_by",
    "gather_dot",
    "gather_rows",
    "gather_sum",
    "softmax_top_k",
    "softmax_top_k_backward",
    "stride_copy",
]
