"""Linear layers in int8 for CPU inference, which read half as many bytes of weights as bf16 layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fairseq_tutel.checkpoint.quantized import Quantized
from fairseq_tutel.kernels.quantized import LANES


class QuantizedLinear(nn.Module):
    """An nn.Linear for inference, in int8 with one scale per row of its matrix.

    Shape suffixes are I (input dimensions) and O (output dimensions).
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize the weight of a linear layer to int8.

        Raises:
            ValueError: an element of the weight is not finite.
        """
        super().__init__()
        form = Quantized("int8", tuple(linear.weight.shape), linear.weight.dtype)
        matrix = form.matrix(form.quantize(linear.weight), linear.weight.dtype)
        assert matrix is not None
        # The copy of the weight is aligned, as torch's int8 kernel requires.
        self.matrix = replace(matrix, values=matrix.values.clone(), scales=matrix.scales.clone())
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Set the dtype of inputs and outputs when the model's dtype changes, as in `model.half()`."""
        super()._apply(fn, recurse)
        self.matrix = self.matrix.to(fn(self.matrix.scales.new_empty(0, dtype=self.matrix.dtype)).dtype)
        return self

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix [O, I], for code that reads the weights of a linear layer."""
        matrix = self.matrix
        return (matrix.values.float() * matrix.scales.unsqueeze(1)).to(matrix.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias [..., O] for x [..., I], rounded as in `QuantizedMatrix.linear`."""
        y_nO = self.matrix.linear(x.reshape(-1, self.in_features), self.bias)
        return y_nO.view(*x.shape[:-1], self.out_features)


def quantize_linear_layers(module: nn.Module, without: type[nn.Module]) -> int:
    """Replace the linear layers in a module by `QuantizedLinear`, except in modules of type `without`.

    Linear layers with an input dimension that torch's int8 kernel does not support are kept. Returns the
    number of replaced layers.
    """
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.in_features % LANES == 0:
            setattr(module, name, QuantizedLinear(child))
            count += 1
        elif not isinstance(child, without):
            count += quantize_linear_layers(child, without)
    return count
