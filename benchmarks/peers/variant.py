"""The base class of all implementations of the layer: it has weights, and returns gradients by name."""

from torch import Tensor, nn

from benchmarks.layer_inputs import Inputs


class Unsupported(Exception):  # noqa: N818 - a reason to leave a variant out, not a failure
    """Raised with a reason if a variant cannot compute a case."""


class Variant(nn.Module):
    """A layer x_TD -> y_TD with copies of a case's weights.

    This class stores the weights as gate [E, D], fc1 [E, H, D], fc2 [E, D, H], fc3 [E, H, D] or None. A
    subclass with another storage format passes no inputs; its `gradients` returns tensors in these shapes.

    Args:
        inputs: inputs of the case, or None.
    """

    # Whether the variant computes the MoE function, so that its results are checked.
    is_layer: bool = True
    # Number of slots per expert if the variant drops assignments; None for a dropless layer.
    capacity: int | None = None
    # A note that is printed with the variant's times.
    note: str = ""
    # Predicted bytes saved for backward, without x and the parameters; None without a prediction.
    formula_bytes: int | None = None

    def __init__(self, inputs: Inputs | None = None) -> None:
        super().__init__()
        for name, weight in ({} if inputs is None else inputs.weights).items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}
