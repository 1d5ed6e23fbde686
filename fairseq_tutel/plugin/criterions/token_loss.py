"""Label-smoothed cross entropy, computed from logits without storing a table of log-probabilities.

The cross entropy is computed in row chunks, in fp32 or wider. Only the logits are saved for backward.
fairseq would also save an fp32 table of log-probabilities, and fill two more tables in backward. Shape
suffixes are N (rows) and V (words).
"""

from typing import Any

import torch
from fairseq.models import FairseqDecoder
from torch import Tensor

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.row_chunks import row_chunks
from fairseq_tutel.plugin.feed_forward import unwrapped


def token_loss(
    logits_NV: Tensor, target_N: Tensor, smoothing: float, ignored: int
) -> tuple[Tensor, Tensor]:
    """Return the label-smoothed cross entropy and the negative log-likelihood (nll), each summed over rows.

    Rows whose target is `ignored` add no loss. With the smoothing s, the losses are nll = -log p(target),
    and loss = (1 - s - s / (V - 1)) nll - s / (V - 1) * sum over words of log p. Both losses are scalars in
    fp32 or wider; nll has no gradient.

    The loss is from Szegedy et al. 2016, section 7; as in fairseq, the target's weight is exactly 1 - s.
    """
    return _TokenLoss.apply(logits_NV, target_N, float(smoothing), ignored)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, smoothing: float, ignored: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        nll = logits_NV.new_zeros((), dtype=dtype)
        spread = torch.zeros_like(nll)
        counts_N = target_N != ignored
        at_target_N = target_N.masked_fill(~counts_N, 0)
        for rows in row_chunks(logits_NV):
            logs_nV = torch.log_softmax(logits_NV[rows], dim=1, dtype=dtype)
            of_target_n = logs_nV.gather(1, at_target_N[rows].unsqueeze(1)).squeeze(1)
            nll -= of_target_n.masked_fill(~counts_N[rows], 0.0).sum()
            if smoothing:
                spread -= logs_nV.sum(dim=1).masked_fill(~counts_N[rows], 0.0).sum()
        ctx.save_for_backward(logits_NV, at_target_N, counts_N)
        # The weight of a word's log-probability is of_each; for the target word, of_target is added.
        of_each = smoothing / (logits_NV.shape[1] - 1) if smoothing else 0.0
        of_target = 1 - smoothing - of_each
        ctx.factors = of_target, of_each
        ctx.mark_non_differentiable(nll)
        # Loss and nll are separate tensors, because fairseq adds to the loss in place.
        return of_target * nll + of_each * spread, nll

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, at_target_N, counts_N = ctx.saved_tensors
        of_target, of_each = ctx.factors
        dlogits_NV = torch.empty_like(logits_NV)
        scales_N = torch.where(counts_N, dloss, 0.0)
        of_all = of_target + of_each * logits_NV.shape[1]
        for rows in row_chunks(logits_NV):
            scales_n1 = scales_N[rows].unsqueeze(1)
            own_nV = dlogits_NV[rows]
            same = own_nV.dtype == dloss.dtype
            d_nV = torch.softmax(logits_NV[rows], dim=1, dtype=dloss.dtype, out=own_nV if same else None)
            d_nV.mul_(of_all * scales_n1)
            if of_each:
                d_nV -= of_each * scales_n1
            d_nV.scatter_add_(1, at_target_N[rows].unsqueeze(1), -of_target * scales_n1)
            if not same:
                own_nV.copy_(d_nV)
        return dlogits_NV, None, None, None


class TokenLossMixin:
    """Mixin that computes a fairseq criterion's loss without storing tables of log-probabilities."""

    eps = 0.0  # The criterion cross_entropy has no label smoothing.
    ignore_prefix_size = 0
    padding_idx: int

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss and nll loss; a model without a plain softmax uses fairseq's code."""
        if not reduce or self.ignore_prefix_size or not _normalizes_logits(model):
            return super().compute_loss(model, net_output, sample, reduce=reduce)  # type: ignore[misc]
        target = model.get_targets(sample, net_output)
        logits = net_output[0]
        return token_loss(logits.reshape(-1, logits.shape[-1]), target.view(-1), self.eps, self.padding_idx)


def _normalizes_logits(model: Any) -> bool:
    """Return whether a model's log-probabilities are the plain log-softmax of its first output."""
    model = unwrapped(model)
    decoder = getattr(model, "decoder", None)
    return (
        isinstance(decoder, FairseqDecoder)
        and getattr(decoder, "adaptive_softmax", None) is None
        and all(
            getattr(type(part), name).__module__.startswith("fairseq.models.")
            for part in (model, decoder)
            for name in ("get_normalized_probs", "get_normalized_probs_scriptable")
        )
    )
