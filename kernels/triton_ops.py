"""The Triton version of every kernel, which `kernels.ops` returns for a GPU."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fairseq_tutel.kernels import reference
from fairseq_tutel.kernels.ffn_by_products import by_products
from fairseq_tutel.kernels.triton_balance import load_loss
from fairseq_tutel.kernels.triton_copy import stride_copy
from fairseq_tutel.kernels.triton_dispatch import gather_dot, gather_rows, gather_sum, gather_values
from fairseq_tutel.kernels.triton_gemm import ffn_up_backward, grouped_linear
from fairseq_tutel.kernels.triton_hidden import ffn_down_backward
from fairseq_tutel.kernels.triton_place import assign_rows
from fairseq_tutel.kernels.triton_route import softmax_top_k, softmax_top_k_backward
from fairseq_tutel.kernels.triton_up import ffn_up
from fairseq_tutel.kernels.triton_weight_grad import grouped_weight_grad

_OTHERS = {
    "assign_rows": assign_rows,
    "gather_dot": gather_dot,
    "gather_rows": gather_rows,
    "gather_sum": gather_sum,
    "gather_values": gather_values,
    "softmax_top_k": softmax_top_k,
    "softmax_top_k_backward": softmax_top_k_backward,
    "load_loss": load_loss,
    "stride_copy": stride_copy,
}
_PRODUCTS: dict[str, Callable[..., Any]] = {
    "ffn_down_backward": ffn_down_backward,
    "ffn_up": ffn_up,
    "ffn_up_backward": ffn_up_backward,
    "grouped_linear": grouped_linear,
    "grouped_weight_grad": grouped_weight_grad,
}
BY_PRODUCTS = by_products({**_OTHERS, **_PRODUCTS})
# fp32 products of the experts as three TF32 products.
IN_TF32X3 = by_products(
    {**_OTHERS, **{name: functools.partial(op, tf32x3=True) for name, op in _PRODUCTS.items()}}
)
# The Triton products do not support fp64 on a GPU, so torch computes fp64 products expert by expert.
IN_FP64 = SimpleNamespace(**{**vars(reference), **_OTHERS})
