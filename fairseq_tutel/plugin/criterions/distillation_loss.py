"""The distillation loss T² KL(teacher || student), computed without a table of probabilities.

The distillation loss is computed in row chunks, in fp32 or wider. For backward, only the scores of teacher
and student are saved. Shape suffixes are N (rows) and V (words). T is the temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.row_chunks import row_chunks


def distillation_loss(
    scores_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor, temperature: float
) -> Tensor:
    """Return T² KL(p || q), summed over rows, with p = softmax(teacher / T) and q = softmax(scores / T).

    The returned loss is a scalar in fp32 or wider; only the student's scores have a gradient. The mask
    `counts_N` is False for rows that are ignored.

    Sources: Hinton et al. 2015, section 2, and Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.2.
    """
    return _Distillation.apply(scores_NV, teacher_NV, counts_N, float(temperature))


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor, temperature: float
    ) -> Tensor:
        total = scores_NV.new_zeros((), dtype=torch.promote_types(scores_NV.dtype, torch.float32))
        for rows, q_nV, p_nV in _logs(scores_NV, teacher_NV, temperature):
            kl_n = (p_nV.exp() * (p_nV - q_nV)).sum(dim=1)
            total += kl_n.masked_fill(~counts_N[rows], 0.0).sum()
        ctx.save_for_backward(scores_NV, teacher_NV, counts_N)
        ctx.temperature = temperature
        return total * temperature**2

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        scores_NV, teacher_NV, counts_N = ctx.saved_tensors
        dscores_NV = torch.empty_like(scores_NV)
        # The gradient has the factor T, which is T² (from the loss) times 1 / T (from the scores).
        scales_N = torch.where(counts_N, dloss * ctx.temperature, 0.0)
        for rows, q_nV, p_nV in _logs(scores_NV, teacher_NV, ctx.temperature):
            d_nV = q_nV.exp_().sub_(p_nV.exp_())
            # Rows of padding may contain NaN.
            d_nV.masked_fill_(~counts_N[rows].unsqueeze(1), 0.0)
            dscores_NV[rows] = d_nV.mul_(scales_N[rows].unsqueeze(1))
        return dscores_NV, None, None, None


def _logs(
    scores_NV: Tensor, teacher_NV: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each row chunk's slice and both models' log-probabilities, which callers may overwrite."""
    for rows in row_chunks(scores_NV):
        yield rows, _log_softmax(scores_NV[rows], temperature), _log_softmax(teacher_NV[rows], temperature)


def _log_softmax(scores_nV: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(scores_nV.dtype, torch.float32)
    scaled_nV = scores_nV if temperature == 1 else scores_nV.to(wide) / temperature
    return torch.log_softmax(scaled_nV, dim=1, dtype=wide)
