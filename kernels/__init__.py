"""Kernels of the MoE layer. Every kernel has a version in plain torch (`reference`) and one in Triton.

`OPS` lists the kernels. Both versions of a kernel have the same signature. `backend_for` selects a version.
"""

from importlib.util import find_spec
from typing import Any

import torch

from fairseq_tutel.kernels import reference

OPS = (
    "gather_rows",
    "gather_pair",
    "gather_sum",
    "gather_gradients",
    "gather_dot",
    "softmax_top_k",
    "softmax_top_k_backward",
    "assign_rows",
    "token_sums",
    "load_loss",
    "grouped_linear",
    "grouped_weight_grad",
    "ffn_up",
    "ffn_down_backward",
    "ffn_up_backward",
)
# The reason why Triton cannot be used, or "" if Triton can be used.
LACKING = "" if find_spec("triton") else "Triton is not installed"


def backend_for(requested: str, device: torch.device) -> tuple[str, str]:
    """Return the backend ("reference" or "triton") that a value of --moe-backend selects, and the reason.

    Raises:
        ValueError: "triton" was requested but cannot run on this device.
    """
    if requested == "reference":
        return "reference", "requested"
    if requested == "auto" and device.type != "cuda":
        return "reference", f"tensors on {device.type}"
    if requested == "triton":
        if LACKING:
            raise ValueError(
                f"backend (--moe-backend) is 'triton' but {LACKING}; install fairseq-tutel[gpu] or choose "
                "auto or reference."
            )
        if device.type != "cuda" and not interpreted():
            raise ValueError(
                f"backend (--moe-backend) is 'triton' but the tensors are on {device.type}; run on a "
                "GPU, set TRITON_INTERPRET=1 to interpret the kernels, or choose auto or reference."
            )
        return "triton", "interpreted" if device.type != "cuda" else "requested"
    if not LACKING:
        return "triton", "a GPU and Triton are available"
    return "reference", f"{LACKING}; experts run one at a time, with one host synchronization per layer"


def ops(
    requested: str, device: torch.device, dtype: torch.dtype = torch.float32, fp32_products: str = "torch"
) -> Any:
    """Return a namespace with the kernels and the FFN functions of the requested backend.

    Args:
        requested: a value of --moe-backend.
        device: the device of the tensors.
        dtype: the dtype of the experts' matrix products. On a GPU, fp64 selects the reference backend.
        fp32_products: a value of --moe-fp32-products.
    """
    backend, _ = backend_for(requested, device)
    if backend == "reference" or (dtype == torch.float64 and not interpreted()):
        return reference
    from fairseq_tutel.kernels import triton_ops

    return triton_ops.IN_TF32X3 if fp32_products == "tf32x3" else triton_ops.BY_PRODUCTS


def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, which works on any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
