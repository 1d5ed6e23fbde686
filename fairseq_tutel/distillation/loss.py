"""The distillation loss T² KL(teacher || student), which stores no table of probabilities.

Row chunks are processed in fp32 or wider. For backward, only the student's scores and the teacher's scores
(or top words) are saved. N rows, V words, K words of a teacher's prediction, T temperature.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.row_chunks import row_chunks


class Answers(NamedTuple):
    """The teacher's K most probable words for each token; all other words are treated as one extra word."""

    words_NK: Tensor  # word IDs, int64
    logs_NK: Tensor  # log-probabilities at temperature T, fp32 or wider


def top_answers(scores_NV: Tensor, top_k: int, temperature: float) -> Answers:
    """Return the `top_k` (at most V) most probable words of each row, and their log-probabilities."""
    top_k = min(top_k, scores_NV.shape[1])
    wide = torch.promote_types(scores_NV.dtype, torch.float32)
    words_NK = scores_NV.new_empty(len(scores_NV), top_k, dtype=torch.int64)
    logs_NK = scores_NV.new_empty(len(scores_NV), top_k, dtype=wide)
    for rows, logs_nV in _logs(scores_NV.detach(), temperature):
        logs_NK[rows], words_NK[rows] = logs_nV.topk(top_k, dim=1)
    return Answers(words_NK, logs_NK)


def distillation_loss(
    scores_NV: Tensor, teacher: Tensor | Answers, counts_N: Tensor, temperature: float
) -> Tensor:
    """Return T² KL(p || q), summed over rows, with p = softmax(teacher / T) and q = softmax(scores / T).

    `Answers` must be computed with the same T. The loss then compares K + 1 words: the K words, and one
    that has the remaining probability. With K = V the result is the same as with logits. The result is a
    scalar in fp32 or wider; only the student's scores have a gradient. `counts_N` is False for rows that
    are ignored.

    Source: Hinton et al. 2015, section 2; Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.2.
    """
    words_NK, given = teacher if isinstance(teacher, Answers) else (None, teacher)
    return _Distillation.apply(scores_NV, given, words_NK, counts_N, float(temperature))


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_NV: Tensor,
        given: Tensor,
        words_NK: Tensor | None,
        counts_N: Tensor,
        temperature: float,
    ) -> Tensor:
        total = scores_NV.new_zeros((), dtype=torch.promote_types(scores_NV.dtype, torch.float32))
        for rows, q_nV in _logs(scores_NV, temperature):
            if words_NK is None:
                p_nV = _log_softmax(given[rows], temperature)
                kl_n = (p_nV.exp() * (p_nV - q_nV)).sum(dim=1)
            else:
                p_nK, words_nK = given[rows], words_NK[rows]
                kl_n = (p_nK.exp() * (p_nK - q_nV.gather(1, words_nK))).sum(dim=1)
                if words_nK.shape[1] < q_nV.shape[1]:
                    rest_n = _rest(p_nK)
                    others_n = q_nV.scatter(1, words_nK, -torch.inf).logsumexp(dim=1)
                    kl_n += torch.xlogy(rest_n, rest_n) - rest_n * others_n
            total += kl_n.masked_fill(~counts_N[rows], 0.0).sum()
        ctx.save_for_backward(scores_NV, given, words_NK, counts_N)
        ctx.temperature = temperature
        return total * temperature**2

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        scores_NV, given, words_NK, counts_N = ctx.saved_tensors
        dscores_NV = torch.empty_like(scores_NV)
        # T is the product of T² from the loss and 1 / T from the scores.
        scales_N = torch.where(counts_N, dloss * ctx.temperature, 0.0)
        for rows, q_nV in _logs(scores_NV, ctx.temperature):
            d_nV = q_nV.exp_()
            if words_NK is None:
                d_nV -= _log_softmax(given[rows], ctx.temperature).exp()
            else:
                p_nK, words_nK = given[rows], words_NK[rows]
                named_nK = d_nV.gather(1, words_nK)
                d_nV.scatter_(1, words_nK, 0.0)
                # The gradient q - p of the additional word is divided among the remaining words.
                least = torch.finfo(d_nV.dtype).tiny
                rest_n = _rest(p_nK) / d_nV.sum(dim=1).clamp_min(least)
                d_nV *= (1 - rest_n).unsqueeze(1)
                d_nV.scatter_(1, words_nK, (named_nK - p_nK.exp()).to(d_nV.dtype))
            # Rows of padding may contain NaN.
            d_nV.masked_fill_(~counts_N[rows].unsqueeze(1), 0.0)
            dscores_NV[rows] = d_nV.mul_(scales_N[rows].unsqueeze(1))
        return dscores_NV, None, None, None, None


def _rest(logs_nK: Tensor) -> Tensor:
    return (1 - logs_nK.exp().sum(dim=1)).clamp_min(0)


def _logs(scores_NV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield each row chunk's slice and its log-probabilities, a tensor that the caller may overwrite."""
    for rows in row_chunks(scores_NV):
        yield rows, _log_softmax(scores_NV[rows], temperature)


def _log_softmax(scores_nV: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(scores_nV.dtype, torch.float32)
    scaled_nV = scores_nV if temperature == 1 else scores_nV.to(wide) / temperature
    return torch.log_softmax(scaled_nV, dim=1, dtype=wide)
