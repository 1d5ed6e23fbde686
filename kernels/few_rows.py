"""An expert's feed-forward of few rows on a CPU, without gradients: what takes time is to read the weights.

n rows, D model_dim, H hidden_dim, I and O what a linear map reads and gives. The same function as
`ffn_by_expert.ffn_forward`, which is its twin.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS

# Elements of rows up to which weight @ rows.T is faster than rows @ weight.T: by MKL 2024.2 on a core of an
# AMD EPYC with AVX-512, weights [2048, 512] are read in 0.24 ms for 2 rows beside 1.06 (for one, which goes
# twice: 0.26 beside 0.44), and in 0.58 for 8 beside 0.66; weights [512, 2048] in 0.31 for 2 beside 0.45.
FEW_ELEMENTS = 4096
FEW_ELEMENTS_OF_ONE = 1024


def ffn_of_few(x_nD: Tensor, tensors: Mapping[str, Tensor], activation: str) -> Tensor:
    """Return the rows [n, D] through one expert, `tensors` of `FFNWeights` by name; n >= 1."""

    def linear(name: str, rows: Tensor) -> Tensor:
        return linear_of_few(rows, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))

    is_glu = "fc3_weight" in tensors
    a_nH = ACTIVATIONS["swish" if is_glu else activation].forward(linear("fc1", x_nD))
    if is_glu:
        a_nH = a_nH * linear("fc3", x_nD)
    return linear("fc2", a_nH)


def linear_of_few(x_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, contiguous, by the product that reads the weights fastest."""
    is_one = x_nI.shape[0] == 1
    if not are_few(x_nI):
        if bias_O is None:
            return torch.mm(x_nI, weight_OI.t())
        return torch.addmm(bias_O, x_nI, weight_OI.t())
    if is_one:
        x_nI = torch.cat((x_nI, x_nI))
    if bias_O is None:
        out_On = torch.mm(weight_OI, x_nI.t())
    else:
        out_On = torch.addmm(bias_O.unsqueeze(1), weight_OI, x_nI.t())
    return (out_On[:, :1] if is_one else out_On).t().contiguous()


def are_few(x_nI: Tensor) -> bool:
    """Whether weights are best multiplied with rows, and not rows with weights."""
    most = FEW_ELEMENTS_OF_ONE if x_nI.shape[0] == 1 else FEW_ELEMENTS
    return 0 < x_nI.numel() <= most and x_nI.dtype == torch.float32
