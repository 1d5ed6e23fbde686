"""This project's layer, built through its public interface, with one of its backends."""

import torch
from torch import Tensor

import fairseq_tutel as ft
from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.variant import Unsupported, Variant
from fairseq_tutel import kernels

NAMES = {"fc1": "fc1_weight", "fc2": "fc2_weight", "fc3": "fc3_weight"}


class Ours(Variant):
    """An ft.MoELayer without biases and without a balance loss, like all variants."""

    def __init__(self, case: Case, inputs: Inputs, backend: str, recompute: bool) -> None:
        super().__init__()
        config = ft.MoEConfig(
            case.model_dim,
            case.hidden_dim,
            case.num_experts,
            top_k=case.top_k,
            activation="relu" if case.is_glu else case.activation,
            expert_type="glu" if case.is_glu else "ffn",
            expert_bias=False,
            balance_loss="none",
            backend=backend,
            recompute_experts=recompute,
        )
        with torch.device("meta"):
            layer = ft.MoELayer(config, seed=1)
        layer = layer.to_empty(device=inputs.x_TD.device).to(inputs.x_TD.dtype)
        self.layer = layer
        with torch.no_grad():
            for name, parameter in self._weights().items():
                parameter.copy_(inputs.weights[name])
        self.formula_bytes = formula_bytes(case, inputs.x_TD.dtype, recompute)

    def _weights(self) -> dict[str, Tensor]:
        experts = dict(self.layer.experts.named_parameters())
        found = {name: experts[own] for name, own in NAMES.items() if own in experts}
        return {"gate": self.layer.gate.weight, **found}

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        return self.layer(x_TD)[0]

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        return {name: parameter.grad for name, parameter in self._weights().items()}


def formula_bytes(case: Case, dtype: torch.dtype, recompute: bool) -> int:
    """Return the maximum bytes that the layer saves for backward, in addition to x and parameters.

    Args:
        case: the layer.
        dtype: dtype of x and of the experts.
        recompute: whether backward recomputes hidden rows.
    """
    tokens, experts, copies = case.tokens, case.num_experts, case.tokens * case.top_k
    hidden = 0 if recompute else copies * case.hidden_dim * (2 if case.is_glu else 1)
    # Bytes of the probabilities and of the weights.
    numbers = tokens * experts + copies
    # The gate computes at least in fp32, so it saves fp32 copies of half-precision x and gate weights.
    wide = max(dtype.itemsize, 4)
    if wide > dtype.itemsize:
        numbers += case.model_dim * (tokens + experts)
    # Expert ids and both row maps are int64; one of the row maps has an extra last element.
    return hidden * dtype.itemsize + wide * numbers + 8 * (3 * copies + 1)


def build(case: Case, inputs: Inputs, backend: str, recompute: bool = False) -> Ours:
    """Return the layer with a backend; with `recompute`, hidden rows are not saved for backward.

    Raises:
        Unsupported: the backend cannot run on this machine.
    """
    try:
        _, reason = kernels.backend_for(backend, inputs.x_TD.device)
        variant = Ours(case, inputs, backend, recompute)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    variant.note = reason
    return variant
