"""A loop over experts as in Hugging Face's models such as Mixtral (eager mode).

Every expert has separate matrices. torch.where finds an expert's tokens, and index_add_ adds its outputs.
"""

import torch
from torch import Tensor, nn

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import activate
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Variant


class Loop(Variant):
    """A MoE layer that computes one expert after the other."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__()
        self.case = case
        self.gate = nn.Parameter(inputs.weights["gate"].clone())
        self.maps = nn.ModuleDict(
            {
                name: nn.ParameterList(nn.Parameter(each.clone()) for each in weight)
                for name, weight in inputs.weights.items()
                if name != "gate"
            }
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, _ = top_k_gate(x_TD, self.gate, self.case.top_k)
        y_TD = torch.zeros_like(x_TD)
        for i in range(self.case.num_experts):
            token, choice = torch.where(ids_TK == i)
            rows = x_TD[token]
            beside = rows @ self.maps["fc3"][i].t() if self.case.is_glu else None
            hidden = activate(self.case, rows @ self.maps["fc1"][i].t(), beside)
            rows = hidden @ self.maps["fc2"][i].t() * weights_TK[token, choice, None].to(x_TD.dtype)
            y_TD.index_add_(0, token, rows)
        return y_TD

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        stacked = {
            name: torch.stack([parameter.grad for parameter in parameters])
            for name, parameters in self.maps.items()
        }
        return {"gate": self.gate.grad, **stacked}


def build(case: Case, inputs: Inputs) -> Loop:
    """Return the loop."""
    return Loop(case, inputs)
