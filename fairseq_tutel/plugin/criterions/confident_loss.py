"""The loss of confident multiple choice learning, in which K of M ensemble members learn each sample.

The largest tensors are the members' logits and their gradients. Losses and probabilities are computed for
one member at a time, in fp32 or wider, and again in backward. Shape suffixes are M (members), N (samples:
images or tokens) and C (classes or words).

The loss is from Lee et al. 2017, "Confident Multiple Choice Learning", equations 2 to 4 and section 3.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.kernels.first_order import first_order


def _scores(logits_NC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return a member's cross entropies [N], and the divergences [N] from the uniform distribution.

    With the member's probabilities P, the cross entropy is CE = -log P(target). The divergence from the
    uniform distribution U is KL(U || P) = -log C - (mean of log P over the classes), in nats.
    """
    z_NC = logits_NC.to(_wide(logits_NC))
    log_sum_N = z_NC.logsumexp(dim=1)
    ce_N = log_sum_N - z_NC.gather(1, target_N.unsqueeze(1)).squeeze(1)
    return ce_N, log_sum_N - z_NC.mean(dim=1) - math.log(z_NC.shape[1])


def assign(ce_MN: Tensor, kl_MN: Tensor, overlap: int, beta: float) -> Tensor:
    """Return a bool mask [M, N] that is true for the `overlap` members that learn each sample.

    A sample is learned by the members with the smallest CE - beta KL (cross entropy minus scaled
    divergence). This choice minimizes the confident loss, since the sum of all members' KL does not depend
    on the choice. If two members have equal values, the member with the smaller index learns the sample.
    """
    order_MN = (ce_MN - beta * kl_MN).argsort(dim=0, stable=True)
    chosen_MN = torch.zeros_like(ce_MN, dtype=torch.bool)
    return chosen_MN.scatter_(0, order_MN[:overlap], True)


def random_labels(logits_MNC: Tensor) -> Tensor:
    """Return random class labels [M, N] for each member and sample, from torch's global generator."""
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
    """Return the loss of confident multiple choice learning, and the mask [M, N] that `assign` returns.

    The confident loss is in nats, summed over samples and members. The loss of a member that learns a
    sample is the cross entropy. Every other member has the loss beta * KL(U || P) or, with `labels_MN`,
    beta * CE(label). The mean of CE over uniformly drawn labels is KL + log C, so this mean has KL's
    gradient. With K = M, all ensemble members learn every sample independently. With beta = 0, the loss is
    that of multiple choice learning.

    Args:
        logits_MNC: any float dtype.
        target_N: int64.
        overlap: the number K of members that learn a sample, from 1 to M.
        beta: weight of the losses of members that do not learn a sample.
        labels_MN: from `random_labels`; None for the loss beta * KL(U || P).
        counts_N: bool, False for ignored samples; None if no sample is ignored.
    """
    if counts_N is not None:
        target_N = target_N.masked_fill(~counts_N, 0)
    ce_MN, kl_MN = _of_members(logits_MNC, [target_N] * len(logits_MNC))
    chosen_MN = assign(ce_MN.detach(), kl_MN.detach(), overlap, beta)
    if labels_MN is not None:
        kl_MN = _of_members(logits_MNC, labels_MN)[0]
    losses_MN = torch.where(chosen_MN, ce_MN, beta * kl_MN)
    if counts_N is not None:
        losses_MN = losses_MN.masked_fill(~counts_N, 0.0)
    return losses_MN.sum(), chosen_MN


def _of_members(logits_MNC: Tensor, labels_MN: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropies and divergences of all members, [M, N] each; backward recomputes both."""
    again = partial(checkpoint, _scores, use_reentrant=False, preserve_rng_state=False)
    ce, kl = zip(*map(again, logits_MNC, labels_MN), strict=True)
    return torch.stack(ce), torch.stack(kl)


def mean_log_probs(logits_MXC: Tensor) -> Tensor:
    """Return the log of the mean of the members' probabilities, [..., C], in fp32 or wider."""
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
            # If all members give a class the probability 0, the share would be exp(-inf + inf) = NaN.
            share_XC = (logs_XC - mean_XC).exp().nan_to_num(nan=0.0) / logits_MXC.shape[0]
            d_XC = dmean_XC * share_XC
            dlogits_MXC[m] = d_XC - logs_XC.exp() * d_XC.sum(dim=-1, keepdim=True)
        return dlogits_MXC


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
