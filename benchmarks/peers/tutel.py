"""Microsoft's Tutel, if `tutel` is installed. The adapter follows Tutel 0.3 and has never been run.

Tutel's layer has its own gate. Its `ffn` experts have biases, which are zero and frozen here, and no
SwiGLU. With a capacity factor of 0, Tutel pads every expert to the load of the busiest expert and drops
nothing.
"""

import torch
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import ACTIVATIONS
from benchmarks.peers.variant import Unsupported, Variant


class Tutel(Variant):
    """A layer built by tutel.moe.moe_layer."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        from tutel import moe

        super().__init__()
        self.layer = moe.moe_layer(
            gate_type={"type": "top", "k": case.top_k, "capacity_factor": 0.0, "fp32_gate": True},
            model_dim=case.model_dim,
            experts={
                "type": "ffn",
                "count_per_node": case.num_experts,
                "hidden_size_per_expert": case.hidden_dim,
                "activation_fn": ACTIVATIONS[case.activation],
            },
        ).to(inputs.x_TD.device, inputs.x_TD.dtype)
        with torch.no_grad():
            self.gate.copy_(inputs.weights["gate"])
            self.layer.experts.batched_fc1_w.copy_(inputs.weights["fc1"])
            self.layer.experts.batched_fc2_w.copy_(inputs.weights["fc2"].mT)
            for bias in (self.layer.experts.batched_fc1_bias, self.layer.experts.batched_fc2_bias):
                bias.zero_().requires_grad_(False)

    @property
    def gate(self) -> Tensor:
        """The gate's weight [E, D]."""
        return self.layer.gates[0].wg.weight

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        return self.layer(x_TD)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        experts = self.layer.experts
        return {
            "gate": self.gate.grad,
            "fc1": experts.batched_fc1_w.grad,
            "fc2": experts.batched_fc2_w.grad.mT,
        }


def build(case: Case, inputs: Inputs) -> Tutel:
    """Return the layer of a case.

    Raises:
        Unsupported: the activation is SwiGLU.
        ImportError: the package is not installed.
    """
    if case.is_glu:
        raise Unsupported("tutel's ffn experts have no SwiGLU")
    return Tutel(case, inputs)
