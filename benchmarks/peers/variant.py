"""What every way to compute the layer has in common: weights in, gradients by the same names out."""

from torch import Tensor, nn

from benchmarks.layer_inputs import Inputs


class Unsupported(Exception):  # noqa: N818 - a reason to leave a variant out, not a failure
    """Why a variant cannot compute a case."""


class Variant(nn.Module):
    """A layer x_TD -> y_TD that owns copies of a case's weights.

    This one owns them as they are: gate [E, D], fc1 [E, H, D], fc2 [E, D, H], fc3 [E, H, D] or None. One
    that stores them otherwise passes no inputs here and gives `gradients` in these shapes.

    Args:
        inputs: of the case, or None.
    """

    # Whether it computes the layer, by which its numbers are checked.
    is_layer: bool = True
    # Slots of an expert if the variant drops; None computes the dropless layer.
    capacity: int | None = None
    # A note for readers of its times.
    note: str = ""
    # What it should keep for backward beside x and its parameters, where it says so.
    formula_bytes: int | None = None

    def __init__(self, inputs: Inputs | None = None) -> None:
        super().__init__()
        for name, weight in ({} if inputs is None else inputs.weights).items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the weights' gradients by the weights' names."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}
