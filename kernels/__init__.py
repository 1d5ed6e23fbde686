"""Kernels of the walk, each op in plain torch (`reference`) and, where it exists, in Triton.

`OPS` pairs them by name; both have the same signature. `backend_for` says which is used, and why.
"""

import functools
import importlib.util
from types import ModuleType

import torch

from fairseq_tutel.kernels import reference

OPS = (
    "gather_rows",
    "gather_sum",
    "gather_dot",
    "softmax_top_k",
    "softmax_top_k_backward",
    "assign_slots",
    "assign_slots_by",
    "stride_copy",
    "grouped_linear",
    "grouped_weight_grad",
    "ffn_up",
    "ffn_down_backward",
    "ffn_up_backward",
)


def backend_for(requested: str, device: torch.device) -> tuple[str, str]:
    """Return (backend, reason) for "auto", "reference" or "triton" on this device.

    Raises:
        ValueError: "triton" was asked for where it cannot run.
    """
    if requested == "reference":
        return "reference", "asked for"
    has_triton = _has_triton()
    if requested == "triton":
        if not has_triton:
            raise ValueError(
                "backend (--moe-backend) is 'triton' but Triton is not installed; "
                "install fairseq-tutel[gpu] or choose auto or reference."
            )
        if device.type != "cuda" and not _interpreted():
            raise ValueError(
                f"backend (--moe-backend) is 'triton' but the tensors are on {device.type}; run on a "
                "GPU, set TRITON_INTERPRET=1 to interpret the kernels, or choose auto or reference."
            )
        return "triton", "interpreted" if device.type != "cuda" else "asked for"
    if device.type == "cuda" and has_triton:
        return "triton", "a GPU and Triton are there"
    return "reference", f"tensors on {device.type}" if device.type != "cuda" else "no Triton"


def ops(requested: str, device: torch.device) -> ModuleType:
    """Return the module that holds `OPS` for the requested backend on this device."""
    backend, _ = backend_for(requested, device)
    if backend == "reference":
        return reference
    from fairseq_tutel.kernels import triton_ops

    return triton_ops


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
