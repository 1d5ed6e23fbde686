"""Tokens sorted by expert and torch's F.grouped_mm, as in torchtitan and Hugging Face's models."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.activation import activate
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant

# Older releases of torch have only torch._grouped_mm.
GROUPED_MM = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
ALIGNMENT_BYTES = 16


class GroupedMM(Variant):
    """A MoE layer that sorts, gathers, multiplies in groups, and restores the order."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.case = case

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD."""
        weights_TK, ids_TK, _ = top_k_gate(x_TD, self.gate, self.case.top_k)
        num_tokens, top_k = ids_TK.shape
        ids_N = ids_TK.flatten()
        order_N = ids_N.argsort(stable=True)
        counts_E = torch.bincount(ids_N, minlength=self.case.num_experts)
        ends_E = counts_E.cumsum(0).to(torch.int32)
        rows_ND = x_TD[order_N // top_k]
        beside = GROUPED_MM(rows_ND, self.fc3.mT, offs=ends_E) if self.case.is_glu else None
        hidden = activate(self.case, GROUPED_MM(rows_ND, self.fc1.mT, offs=ends_E), beside)
        rows_ND = GROUPED_MM(hidden, self.fc2.mT, offs=ends_E)
        copies_TKD = rows_ND[order_N.argsort()].view(num_tokens, top_k, -1)
        return torch.bmm(weights_TK.to(x_TD.dtype).unsqueeze(1), copies_TKD).squeeze(1)


def build(case: Case, inputs: Inputs) -> GroupedMM:
    """Return the layer of a case.

    Raises:
        Unsupported: this torch has no grouped_mm, or does not support the dtype or dimensions.
    """
    dtype = inputs.x_TD.dtype
    if GROUPED_MM is None:
        raise Unsupported(f"torch {torch.__version__} has no grouped_mm")
    if dtype == torch.float64:
        raise Unsupported("grouped_mm takes no float64")
    for name in ("model_dim", "hidden_dim"):
        if getattr(case, name) * dtype.itemsize % ALIGNMENT_BYTES:
            raise Unsupported(f"{name} {getattr(case, name)} is no multiple of {ALIGNMENT_BYTES} bytes")
    return GroupedMM(case, inputs)
