"""Runs the FFN of one expert on a few rows on a CPU, without gradients.

The results equal those of `ffn_by_expert.ffn_forward`. Shapes use n for rows, D for model_dim, H for
hidden_dim, and I and O for the input and output dimensions of a linear map.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.quantized import QuantizedMatrix

# weight @ rows.T is faster than rows @ weight.T for several rows with at most FEW_ELEMENTS elements in all,
# and for one row with at most FEW_ELEMENTS_OF_ONE. The times are for MKL 2024.2 on one core of an AMD EPYC
# with AVX-512, and a weight [2048, 512]. For 2 rows, weight @ rows.T took 0.24 ms and rows @ weight.T 1.06
# ms; for 8 rows, 0.58 and 0.66 ms; for 1 row, which weight @ rows.T reads twice, 0.26 and 0.44 ms.
FEW_ELEMENTS = 4096
FEW_ELEMENTS_OF_ONE = 1024


def ffn_of_few(x_nD: Tensor, tensors: Mapping[str, Any], activation: str) -> Tensor:
    """Run the FFN of one expert on a few rows [n, D].

    `tensors` maps the field names of `FFNWeights` to tensors. The weight matrices may be quantized.
    """

    def linear(name: str, rows: Tensor) -> Tensor:
        return linear_of_few(rows, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))

    is_glu = "fc3_weight" in tensors
    a_nH = ACTIVATIONS["swish" if is_glu else activation].forward(linear("fc1", x_nD))
    if is_glu:
        a_nH = a_nH * linear("fc3", x_nD)
    return linear("fc2", a_nH)


def linear_of_few(x_nI: Tensor, weight_OI: Tensor | QuantizedMatrix, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias as a contiguous tensor, computed in the faster operand order."""
    if isinstance(weight_OI, QuantizedMatrix):
        return weight_OI.linear(x_nI, bias_O)
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
    """Return whether the rows are so few that weight @ rows.T is faster than rows @ weight.T."""
    most = FEW_ELEMENTS_OF_ONE if x_nI.shape[0] == 1 else FEW_ELEMENTS
    return 0 < x_nI.numel() <= most and x_nI.dtype == torch.float32
