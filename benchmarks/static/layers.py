"""Counts the launches, host reads and bytes of one MoE layer, traced on meta tensors.

T tokens, D model_dim, H hidden_dim, E experts, K top_k, R = T * K rows.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import fairseq_tutel as ft
from benchmarks.layer_cases import CUDA_CASES, Case
from benchmarks.static.trace import Trace, recorded

CASES = {
    "qwen3_30b": replace(CUDA_CASES["E"], tokens=16384),
    "mixtral": CUDA_CASES["C"],
}
DECODED = 32  # sentences, each with one token per step
DTYPE = torch.bfloat16
LOSSES = ("none", "gshard")


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row per layer and phase: forward and backward with and without a balance loss, decoding."""
    for name, case in CASES.items():
        for loss in LOSSES:
            for phase, trace in zip(("forward", "backward"), trained(case, loss), strict=True):
                yield _row(name, case, phase, loss, trace)
        few = replace(case, tokens=DECODED)
        yield _row(name, few, "decoding", "none", decoded(few))


def trained(case: Case, loss: str, bias: bool = False) -> tuple[Trace, Trace]:
    """Return the traces of the forward and the backward pass of a layer in training."""
    layer, x_TD = _layer(case, loss, bias).train(), _tokens(case).requires_grad_()
    with recorded() as forward:
        y_TD, output = layer(x_TD)
    ends = [y_TD] if loss == "none" else [y_TD, output.balance_loss]
    gradients = [torch.empty_like(end) for end in ends]
    with recorded() as backward:
        torch.autograd.backward(ends, gradients)
    return forward, backward


@torch.no_grad()
def decoded(case: Case) -> Trace:
    """Return the trace of one decoding step."""
    layer, x_TD = _layer(case, "none", False).eval(), _tokens(case)
    with recorded() as trace:
        layer(x_TD)
    return trace


def floor_bytes(case: Case, phase: str) -> int:
    """Return the bytes that any implementation with saved hidden rows moves at least in a phase.

    Forward reads x and the weights, and writes y and the hidden rows. Backward reads dy, x, the weights and
    the hidden rows, and writes dx and the gradients of the weights. Decoding saves no hidden rows.
    """
    maps = 3 if case.is_glu else 2
    rows = case.tokens * case.top_k
    weights = maps * case.model_dim * case.hidden_dim * min(case.num_experts, rows)
    hidden = 0 if phase == "decoding" else (maps - 1) * rows * case.hidden_dim
    tokens, copies = (3, 2) if phase == "backward" else (2, 1)
    elements = copies * weights + hidden + tokens * case.tokens * case.model_dim
    return elements * DTYPE.itemsize


def _row(name: str, case: Case, phase: str, loss: str, trace: Trace) -> dict[str, Any]:
    return {
        "layer": name,
        "phase": phase,
        "balance_loss": loss,
        "tokens": case.tokens,
        "launches": len(trace.launches),
        "reads": len(trace.reads),
        "bytes": trace.bytes,
        "floor_bytes": floor_bytes(case, phase),
        "names": dict(Counter(trace.launches)),
    }


def _layer(case: Case, loss: str, bias: bool) -> ft.MoELayer:
    config = ft.MoEConfig(
        case.model_dim,
        case.hidden_dim,
        case.num_experts,
        top_k=case.top_k,
        expert_type="glu" if case.is_glu else "ffn",
        expert_bias=bias,
        balance_loss=loss,
    )
    with torch.device("meta"):
        return ft.MoELayer(config, seed=1).to(DTYPE)


def _tokens(case: Case) -> torch.Tensor:
    return torch.empty(case.tokens, case.model_dim, dtype=DTYPE, device="meta")
