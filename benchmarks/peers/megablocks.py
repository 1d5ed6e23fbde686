"""MegaBlocks' dropless layer, if `megablocks` is installed. This adapter has never been run.

The adapter follows the source of 2025 and uses grouped products, because MegaBlocks disables its
block-sparse products since Triton 3.2.
"""

from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import ACTIVATIONS
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant


class MegaBlocks(Variant):
    """The common gate and the experts of megablocks' dMoE."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        layers = import_module("megablocks.layers.dmoe")
        arguments = import_module("megablocks.layers.arguments").Arguments(
            hidden_size=case.model_dim,
            ffn_hidden_size=case.hidden_dim,
            moe_num_experts=case.num_experts,
            moe_top_k=case.top_k,
            activation_fn=nn.functional.silu if case.is_glu else ACTIVATIONS[case.activation],
            mlp_type="glu" if case.is_glu else "mlp",
            mlp_impl="grouped",
            bias=False,
            return_bias=False,
            fp16=False,
            bf16=inputs.x_TD.dtype == torch.bfloat16,
            device=inputs.x_TD.device,
        )
        super().__init__()
        self.case = case
        self.experts = layers.dMoE(arguments).experts
        self.gate = nn.Parameter(inputs.weights["gate"].clone())
        mlp, weights = self.experts.mlp, inputs.weights
        self.stored = {"fc1": mlp.w1, **({"fc3": mlp.v1} if case.is_glu else {})}
        self.fc2 = mlp.w2
        with torch.no_grad():
            for name, parameter in self.stored.items():
                parameter.copy_(weights[name].flatten(0, 1))
            self.fc2.copy_(weights["fc2"].mT.flatten(0, 1))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, probs_TE = top_k_gate(x_TD, self.gate, self.case.top_k)
        weights_TK, probs_TE = weights_TK.to(x_TD.dtype), probs_TE.to(x_TD.dtype)
        return self.experts(x_TD.unsqueeze(1), probs_TE, weights_TK, ids_TK).squeeze(1)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        shape = (self.case.num_experts, self.case.hidden_dim, self.case.model_dim)
        found = {name: parameter.grad.view(shape) for name, parameter in self.stored.items()}
        return {"gate": self.gate.grad, "fc2": self.fc2.grad.view(shape).mT, **found}


def build(case: Case, inputs: Inputs) -> MegaBlocks:
    """Return the layer of a case.

    Raises:
        Unsupported: there is no GPU.
        ImportError: the package is not installed.
    """
    if inputs.x_TD.device.type != "cuda":
        # Importing megablocks needs a GPU.
        raise Unsupported("megablocks needs a GPU")
    return MegaBlocks(case, inputs)
