"""The Triton version of every kernel, which `kernels.ops` returns for a GPU."""

import functools

from fairseq_tutel.kernels import OPS
from fairseq_tutel.kernels.ffn_by_products import by_products
from fairseq_tutel.kernels.triton_balance import load_loss as load_loss
from fairseq_tutel.kernels.triton_balance import token_sums as token_sums
from fairseq_tutel.kernels.triton_dispatch import gather_dot as gather_dot
from fairseq_tutel.kernels.triton_dispatch import gather_gradients as gather_gradients
from fairseq_tutel.kernels.triton_dispatch import gather_pair as gather_pair
from fairseq_tutel.kernels.triton_dispatch import gather_rows as gather_rows
from fairseq_tutel.kernels.triton_dispatch import gather_sum as gather_sum
from fairseq_tutel.kernels.triton_gemm import ffn_up_backward as ffn_up_backward
from fairseq_tutel.kernels.triton_gemm import grouped_linear as grouped_linear
from fairseq_tutel.kernels.triton_hidden import ffn_down_backward as ffn_down_backward
from fairseq_tutel.kernels.triton_place import assign_rows as assign_rows
from fairseq_tutel.kernels.triton_route import gate_backward as gate_backward
from fairseq_tutel.kernels.triton_route import softmax_top_k as softmax_top_k
from fairseq_tutel.kernels.triton_route import softmax_top_k_backward as softmax_top_k_backward
from fairseq_tutel.kernels.triton_up import ffn_up as ffn_up
from fairseq_tutel.kernels.triton_weight_grad import grouped_weight_grad as grouped_weight_grad

_ALL = {name: globals()[name] for name in (*OPS, "gate_backward")}
_PRODUCTS = {name: op for name, op in _ALL.items() if name.startswith(("grouped_", "ffn_"))}
BY_PRODUCTS = by_products(_ALL)
# For --moe-fp32-products tf32x3: each fp32 product is three TF32 products.
IN_TF32X3 = by_products({**_ALL, **{n: functools.partial(op, tf32x3=True) for n, op in _PRODUCTS.items()}})
