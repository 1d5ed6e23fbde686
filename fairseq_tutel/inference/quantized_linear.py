"""Linear layers in int8, for inference on a CPU: each token of a decoder reads half of bf16's bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fairseq_tutel.checkpoint.quantized import Quantized
from fairseq_tutel.kernels.quantized import LANES


class QuantizedLinear(nn.Module):
    """A linear layer in int8 with a scale per row of its matrix; replaces an nn.Linear in inference.

    I and O are the input and output dimensions.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize the weight of a layer.

        Raises:
            ValueError: a weight is not finite.
        """
        super().__init__()
        form = Quantized("int8", tuple(linear.weight.shape), linear.weight.dtype)
        matrix = form.matrix(form.quantize(linear.weight), linear.weight.dtype)
        assert matrix is not None
        # The copy is aligned, which torch's kernel needs.
        self.matrix = replace(matrix, values=matrix.values.clone(), scales=matrix.scales.clone())
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert the unpacked matrix when the model's dtype changes, as in `model.half()`."""
        super()._apply(fn, recurse)
        self.matrix = self.matrix.to(fn(self.matrix.scales.new_empty(0, dtype=self.matrix.dtype)).dtype)
        return self

    @property
    def weight(self) -> Tensor:
        """The unpacked matrix [O, I], for code that reads the weights of a linear layer."""
        matrix = self.matrix
        return (matrix.values.float() * matrix.scales.unsqueeze(1)).to(matrix.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias for x [..., I], [..., O] in the dtype of x, rounded to bf16."""
        y_nO = self.matrix.linear(x.reshape(-1, self.in_features), self.bias)
        return y_nO.view(*x.shape[:-1], self.out_features)


def quantize_linear_layers(module: nn.Module, without: type[nn.Module]) -> int:
    """Replace the linear layers within a module, in place, except within modules of the type `without`.

    Layers with an input dimension that torch's kernel cannot read are kept. Returns the number of replaced
    layers.
    """
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.in_features % LANES == 0:
            setattr(module, name, QuantizedLinear(child))
            count += 1
        elif not isinstance(child, without):
            count += quantize_linear_layers(child, without)
    return count
