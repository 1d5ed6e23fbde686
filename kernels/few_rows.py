"""An expert's feed-forward of few rows on a CPU, without gradients: what takes time is to read the weights.

n rows, D model_dim, H hidden_dim, I and O what a linear map reads and gives. The same function as
`ffn_by_expert.ffn_forward`, which is its twin.
"""

import torch
from torch import Tensor

from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.weights import FFNWeights

# Elements of rows up to which weight @ rows.T is faster than rows @ weight.T: by MKL 2024.2 on a core of an
# AMD EPYC with AVX-512, weights [2048, 512] are read in 0.24 ms for 2 rows beside 1.06 (for one, which goes
# twice: 0.26 beside 0.44), and in 0.58 for 8 beside 0.66; weights [512, 2048] in 0.31 for 2 beside 0.45.
FEW_ELEMENTS = 4096
FEW_ELEMENTS_OF_ONE = 1024


def ffn_of_few(x_nD: Tensor, weights: FFNWeights, activation: str) -> Tensor:
    """Return the rows [n, D] through one expert, its `weights` without their first dimension; n >= 1."""
    kind = ACTIVATIONS["swish" if weights.is_glu else activation]
    a_nH = kind.forward(linear_of_few(x_nD, weights.fc1_weight, weights.fc1_bias))
    if weights.fc3_weight is not None:
        a_nH = a_nH * linear_of_few(x_nD, weights.fc3_weight, weights.fc3_bias)
    return linear_of_few(a_nH, weights.fc2_weight, weights.fc2_bias)


def linear_of_few(x_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, contiguous, by the product that reads the weights fastest."""
    num_rows = x_nI.shape[0]
    if not are_few(x_nI):
        if bias_O is None:
            return torch.mm(x_nI, weight_OI.t())
        return torch.addmm(bias_O, x_nI, weight_OI.t())
    if num_rows == 1:
        x_nI = x_nI.expand(2, -1).contiguous()
    if bias_O is None:
        out_On = torch.mm(weight_OI, x_nI.t())
    else:
        out_On = torch.addmm(bias_O.unsqueeze(1), weight_OI, x_nI.t())
    return out_On.t()[:num_rows].contiguous()


def are_few(x_nI: Tensor) -> bool:
    """Whether weights are best multiplied with rows, and not rows with weights."""
    most = FEW_ELEMENTS_OF_ONE if x_nI.shape[0] == 1 else FEW_ELEMENTS
    return 0 < x_nI.numel() <= most and x_nI.dtype == torch.float32
