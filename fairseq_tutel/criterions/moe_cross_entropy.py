"""moe_cross_entropy, moe_label_smoothed_cross_entropy and moe_masked_lm."""

import math
from dataclasses import dataclass
from typing import Any

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.models import FairseqDecoder
from torch import Tensor

from fairseq_tutel.criterions.expert_log import reduce_expert_log
from fairseq_tutel.criterions.gate_loss import GateLossMixin
from fairseq_tutel.criterions.token_loss import token_loss
from fairseq_tutel.plugin.registration.flags import GateLossOptions


class TokenLossMixin:
    """Goes before a stock criterion on logits: the same loss, without tables of log-probabilities."""

    eps = 0.0  # cross_entropy has no smoothing
    ignore_prefix_size = 0
    padding_idx: int

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, nll loss), summed; stock's own where another thing than logits is normalised."""
        if not reduce or self.ignore_prefix_size or not _normalizes_logits(model):
            return super().compute_loss(model, net_output, sample, reduce=reduce)  # type: ignore[misc]
        target = model.get_targets(sample, net_output)
        logits = net_output[0]
        return token_loss(
            logits.reshape(-1, logits.shape[-1]), target.view(-1), self.eps, self.padding_idx
        )


def _normalizes_logits(model: Any) -> bool:
    """Whether log-probabilities are stock's log-softmax of the first output, and nothing else."""
    while hasattr(model, "module"):
        model = model.module
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


@dataclass
class MoECrossEntropyConfig(GateLossOptions, CrossEntropyCriterionConfig):
    """Options of moe_cross_entropy."""


@register_criterion("moe_cross_entropy", dataclass=MoECrossEntropyConfig)
class MoECrossEntropyCriterion(GateLossMixin, TokenLossMixin, CrossEntropyCriterion):
    """Cross entropy plus the balance loss; perplexity is that of the cross entropy alone."""

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log loss (with the balance loss), nll_loss, ppl and the expert metrics."""
        _reduce(logging_outputs, predicted="ntokens")


@dataclass
class MoEMaskedLmConfig(GateLossOptions, MaskedLmConfig):
    """Options of moe_masked_lm."""


@register_criterion("moe_masked_lm", dataclass=MoEMaskedLmConfig)
class MoEMaskedLmLoss(GateLossMixin, MaskedLmLoss):
    """Masked language model loss plus the balance loss; perplexity is over the masked tokens."""

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log loss (with the balance loss), nll_loss, ppl and the expert metrics."""
        _reduce(logging_outputs, predicted="sample_size")


def _reduce(logging_outputs: list[dict[str, Any]], predicted: str) -> None:
    """Log what was summed, in bits; `predicted` names the count of tokens behind nll_loss."""
    loss, nll, tokens, sample_size = (
        sum(log.get(key, 0) for log in logging_outputs)
        for key in ("loss", "nll_loss", predicted, "sample_size")
    )
    bits = 1 / math.log(2)
    metrics.log_scalar("loss", loss / sample_size * bits, sample_size, round=3)
    metrics.log_scalar("nll_loss", nll / tokens * bits, tokens, round=3)
    metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
    reduce_expert_log(logging_outputs)


@dataclass
class MoELabelSmoothedCrossEntropyConfig(GateLossOptions, LabelSmoothedCrossEntropyCriterionConfig):
    """Options of moe_label_smoothed_cross_entropy."""


@register_criterion(
    "moe_label_smoothed_cross_entropy", dataclass=MoELabelSmoothedCrossEntropyConfig
)
class MoELabelSmoothedCrossEntropyCriterion(
    GateLossMixin, TokenLossMixin, LabelSmoothedCrossEntropyCriterion
):
    """Label-smoothed cross entropy plus the balance loss."""
