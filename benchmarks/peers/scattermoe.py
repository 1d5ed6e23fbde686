"""ScatterMoE, if `scattermoe` is installed. The adapter follows its source of 2025; it was never run."""

from importlib import import_module

import torch
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import ACTIVATIONS
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant


class ScatterMoE(Variant):
    """The common gate and scattermoe.mlp's MLP or GLUMLP."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        mlp = import_module("scattermoe.mlp")
        super().__init__()
        self.case = case
        sizes = (case.model_dim, case.hidden_dim, case.num_experts, case.top_k)
        if case.is_glu:
            experts = mlp.GLUMLP(*sizes)
        else:
            experts = mlp.MLP(*sizes, activation=ACTIVATIONS[case.activation])
        self.experts = experts.to(inputs.x_TD.device, inputs.x_TD.dtype)
        self.gate = torch.nn.Parameter(inputs.weights["gate"].clone())
        first = inputs.weights["fc1"]
        if case.is_glu:  # the first half is the one that is not passed to the activation
            first = torch.cat([inputs.weights["fc3"], first], dim=1)
        with torch.no_grad():
            self.experts.experts.weight.copy_(first)
            self.experts.output_experts.weight.copy_(inputs.weights["fc2"])

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, _ = top_k_gate(x_TD, self.gate, self.case.top_k)
        return self.experts(x_TD, weights_TK.to(x_TD.dtype), ids_TK)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        first = self.experts.experts.weight.grad
        found = {"gate": self.gate.grad, "fc2": self.experts.output_experts.weight.grad}
        if not self.case.is_glu:
            return {**found, "fc1": first}
        fc3, fc1 = first.chunk(2, dim=1)
        return {**found, "fc1": fc1, "fc3": fc3}


def build(case: Case, inputs: Inputs) -> ScatterMoE:
    """Return the layer of a case.

    Raises:
        Unsupported: there is no GPU.
        ImportError: the package is not installed.
    """
    if inputs.x_TD.device.type != "cuda":
        import_module("scattermoe")
        raise Unsupported("scattermoe needs a GPU")
    return ScatterMoE(case, inputs)
