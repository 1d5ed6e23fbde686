"""Liger-Kernel's fused MoE layer, if `liger_kernel` is installed. This adapter has never been run.

The adapter follows ops/fused_moe.py of 2026, which supports only SwiGLU and reads once from the device per
forward.
"""

from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant


class Liger(Variant):
    """The common gate and LigerFusedMoEFunction."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__()
        self.function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
        self.case, weights = case, inputs.weights
        self.gate = nn.Parameter(weights["gate"].clone())
        self.gate_up = nn.Parameter(torch.cat([weights["fc1"], weights["fc3"]], dim=1))
        self.down = nn.Parameter(weights["fc2"].clone())

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, _ = top_k_gate(x_TD, self.gate, self.case.top_k)
        ids_TK, weights_TK = ids_TK.to(torch.int32), weights_TK.to(x_TD.dtype)
        return self.function.apply(x_TD, self.gate_up, self.down, ids_TK, weights_TK)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        fc1, fc3 = self.gate_up.grad.chunk(2, dim=1)
        return {"gate": self.gate.grad, "fc1": fc1, "fc3": fc3, "fc2": self.down.grad}


def build(case: Case, inputs: Inputs) -> Liger:
    """Return the layer of a case.

    Raises:
        Unsupported: the activation is not SwiGLU, or there is no GPU.
        ImportError: the package is not installed.
    """
    import_module("liger_kernel")
    if not case.is_glu:
        raise Unsupported("liger_kernel's fused MoE is SwiGLU alone")
    if inputs.x_TD.device.type != "cuda":
        raise Unsupported("liger_kernel needs a GPU")
    return Liger(case, inputs)
