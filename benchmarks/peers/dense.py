"""The baseline of all variants: a dense feed-forward layer with as many floating-point operations.

The layer is nn.Linear D -> K * H -> D with the same activation; for swiglu, the first two matrices are one
product. It has no gate and no routing. It computes another function, so its outputs are not checked.
"""

from torch import Tensor, nn

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import activate
from benchmarks.peers.variant import Variant


class Dense(Variant):
    """fc1, activation, fc2."""

    is_layer = False

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__()
        hidden_dim = case.top_k * case.hidden_dim
        factory = {"device": inputs.x_TD.device, "dtype": inputs.x_TD.dtype}
        first = 2 * hidden_dim if case.is_glu else hidden_dim
        self.case = case
        self.fc1 = nn.Linear(case.model_dim, first, bias=False, **factory)
        self.fc2 = nn.Linear(hidden_dim, case.model_dim, bias=False, **factory)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        hidden = self.fc1(x_TD)
        parts: tuple[Tensor, ...] = hidden.chunk(2, dim=1) if self.case.is_glu else (hidden,)
        return self.fc2(activate(self.case, parts[0], parts[-1]))


def build(case: Case, inputs: Inputs) -> Dense:
    """Return the dense layer of a case."""
    return Dense(case, inputs)
