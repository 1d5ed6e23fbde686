"""Confident multiple choice learning: some members learn a sample, the others are to be unsure of it.

Two tables of numbers are in memory, the members' logits and, in backward, their gradients; what is between
them is made of one member at a time, in fp32 at least. Nothing is kept for backward but logits and labels.
M members, N samples (images, tokens), C classes (words), K members that learn a sample.

Source: Lee et al. 2017, "Confident Multiple Choice Learning", equations 2 to 4; the assignment of the exact
loss and stochastic labeling are their section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order


def scores(logits_MNC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return every member's cross entropy of every sample, and its divergence from knowing nothing.

    CE = -log P(target); KL(U || P) = -log C - mean over the classes of log P.

    Args:
        logits_MNC: [M, N, C], any float dtype.
        target_N: [N] int64.

    Returns:
        ce_MN: [M, N] in nats, fp32 at least; no gradient, likewise
        kl_MN: [M, N].
    """
    with torch.no_grad():
        columns = [_scores_of_one(logits_NC, target_N) for logits_NC in logits_MNC]
    ce_M, kl_M = zip(*columns, strict=True)
    return torch.stack(ce_M), torch.stack(kl_M)


def _scores_of_one(logits_NC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    z_NC = logits_NC.to(_wide(logits_NC))
    log_sum_N = z_NC.logsumexp(dim=1)
    ce_N = log_sum_N - z_NC.gather(1, target_N.unsqueeze(1)).squeeze(1)
    return ce_N, log_sum_N - z_NC.mean(dim=1) - math.log(z_NC.shape[1])


def assign(ce_MN: Tensor, kl_MN: Tensor, overlap: int, beta: float) -> Tensor:
    """Return who learns which sample, [M, N] bool: the K members of the smallest CE - beta KL.

    No other choice of K members has a smaller confident loss, since all members' KL together do not depend
    on it. Among equals the lower member is taken.

    Args:
        ce_MN: see `scores`, as the next.
        kl_MN: [M, N].
        overlap: K, from 1 to M.
        beta: weight of KL.
    """
    order_MN = (ce_MN - beta * kl_MN).argsort(dim=0, stable=True)
    chosen_MN = torch.zeros_like(ce_MN, dtype=torch.bool)
    return chosen_MN.scatter_(0, order_MN[:overlap], True)


def random_labels(logits_MNC: Tensor) -> Tensor:
    """Return a class for every member and sample, [M, N], from torch's global generator."""
    members, samples, classes = logits_MNC.shape
    return torch.randint(classes, (members, samples), device=logits_MNC.device)


def confident_loss(
    logits_MNC: Tensor,
    target_N: Tensor,
    overlap: int,
    beta: float,
    labels_MN: Tensor | None = None,
    counts_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss, who learned what): the sum over samples of their members' losses.

    Of a member that learns a sample its cross entropy, of another beta * KL(U || P) or, with labels,
    beta * CE at its label: of labels that are drawn evenly the mean is KL + log C, and its gradient KL's.
    With K = M all learn all, as independent members; with beta 0 it is multiple choice learning.

    Args:
        logits_MNC: [M, N, C], any float dtype.
        target_N: [N] int64.
        overlap: K, from 1 to M.
        beta: weight of what those lose that do not learn.
        labels_MN: [M, N] int64, what `random_labels` gives; None for the exact loss.
        counts_N: [N] bool, False for samples that are left out; None where all count.

    Returns:
        loss: [] in nats, differentiable, in fp32 at least.
        chosen_MN: [M, N] bool, see `assign`.
    """
    if counts_N is not None:
        target_N = target_N.masked_fill(~counts_N, 0)
    return _ConfidentLoss.apply(logits_MNC, target_N, overlap, beta, labels_MN, counts_N)


class _ConfidentLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_MNC: Tensor,
        target_N: Tensor,
        overlap: int,
        beta: float,
        labels_MN: Tensor | None,
        counts_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ce_MN, kl_MN = scores(logits_MNC, target_N)
        chosen_MN = assign(ce_MN, kl_MN, overlap, beta)
        if labels_MN is not None:
            columns = zip(logits_MNC, labels_MN, strict=True)
            kl_MN = torch.stack([_scores_of_one(z_NC, drawn_N)[0] for z_NC, drawn_N in columns])
        losses_MN = torch.where(chosen_MN, ce_MN, beta * kl_MN)
        if counts_N is not None:
            losses_MN = losses_MN.masked_fill(~counts_N, 0.0)
        ctx.save_for_backward(logits_MNC, target_N, chosen_MN, labels_MN, counts_N)
        ctx.beta = beta
        ctx.mark_non_differentiable(chosen_MN)
        return losses_MN.sum(), chosen_MN

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits_MNC, target_N, chosen_MN, labels_MN, counts_N = ctx.saved_tensors
        classes = logits_MNC.shape[2]
        dlogits_MNC = torch.empty_like(logits_MNC)
        for m, logits_NC in enumerate(logits_MNC):
            weight_N = torch.where(chosen_MN[m], 1.0, ctx.beta).to(dloss) * dloss
            if counts_N is not None:
                weight_N = weight_N.masked_fill(~counts_N, 0.0)
            d_NC = torch.softmax(logits_NC, dim=1, dtype=dloss.dtype) * weight_N.unsqueeze(1)
            if labels_MN is None:
                d_NC -= weight_N.masked_fill(chosen_MN[m], 0.0).unsqueeze(1) / classes
                label_N, at_label_N = target_N, weight_N.masked_fill(~chosen_MN[m], 0.0)
            else:
                label_N = torch.where(chosen_MN[m], target_N, labels_MN[m])
                at_label_N = weight_N
            d_NC.scatter_add_(1, label_N.unsqueeze(1), -at_label_N.unsqueeze(1))
            dlogits_MNC[m] = d_NC
        return dlogits_MNC, None, None, None, None, None


def mean_log_probs(logits_MXC: Tensor) -> Tensor:
    """Return the logarithm of the mean of the members' probabilities, [..., C], in fp32 at least.

    Args:
        logits_MXC: [M, ..., C], any float dtype.
    """
    return _MeanLogProbs.apply(logits_MXC)


class _MeanLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MXC: Tensor) -> Tensor:
        dtype = _wide(logits_MXC)
        sum_XC = torch.log_softmax(logits_MXC[0], dim=-1, dtype=dtype)
        for logits_XC in logits_MXC[1:]:
            sum_XC = torch.logaddexp(sum_XC, torch.log_softmax(logits_XC, dim=-1, dtype=dtype))
        mean_XC = sum_XC - math.log(logits_MXC.shape[0])
        ctx.save_for_backward(logits_MXC, mean_XC)
        return mean_XC

    @staticmethod
    @first_order
    def backward(ctx: Any, dmean_XC: Tensor) -> Tensor:
        logits_MXC, mean_XC = ctx.saved_tensors
        dlogits_MXC = torch.empty_like(logits_MXC)
        for m, logits_XC in enumerate(logits_MXC):
            logs_XC = torch.log_softmax(logits_XC, dim=-1, dtype=dmean_XC.dtype)
            # A class that all members exclude has no share in anything: exp(-inf + inf).
            share_XC = (logs_XC - mean_XC).exp().nan_to_num(nan=0.0) / logits_MXC.shape[0]
            d_XC = dmean_XC * share_XC
            dlogits_MXC[m] = d_XC - logs_XC.exp() * d_XC.sum(dim=-1, keepdim=True)
        return dlogits_MXC


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
