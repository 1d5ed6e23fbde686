"""The gate of all variants without their own gate, so that these have equal choices and gate costs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def top_k_gate(x_TD: Tensor, gate_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights [T, K], experts [T, K] int64, probabilities [T, E]) in fp32, fp64 for fp64.

    The softmax is over all experts; for K > 1, the weights of the chosen experts are divided by their sum.
    """
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    probs_TE = torch.softmax(F.linear(x_TD.to(dtype), gate_ED.to(dtype)), dim=1)
    weights_TK, ids_TK = probs_TE.topk(top_k, dim=1)
    if top_k > 1:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    return weights_TK, ids_TK, probs_TE
