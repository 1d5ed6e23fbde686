"""Registers a MoE variant of every fairseq criterion; MoE variants add the balance loss."""

import dataclasses
import math
from typing import Any

from fairseq import utils
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY, register_criterion
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.logging import metrics

from fairseq_tutel.plugin.criterions import (
    cmcl,  # noqa: F401 - registered before variants
    image_classification,  # noqa: F401 - registered before variants
)
from fairseq_tutel.plugin.criterions.expert_log import reduce_expert_log
from fairseq_tutel.plugin.criterions.gate_loss import GateLossMixin
from fairseq_tutel.plugin.criterions.token_loss import TokenLossMixin
from fairseq_tutel.plugin.registration.flags import GateLossOptions
from fairseq_tutel.plugin.registration.variants import variant_of


class _PerplexityMixin(GateLossMixin):
    """Mixin that computes perplexity from nll_loss, because the loss includes the balance loss."""

    predicted = "ntokens"  # The number of tokens is logged under this key.

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log losses in bits (`loss` includes the balance loss), perplexity and expert metrics."""
        loss, nll, tokens, sample_size = (
            sum(log.get(key, 0) for log in logging_outputs)
            for key in ("loss", "nll_loss", cls.predicted, "sample_size")
        )
        bits = 1 / math.log(2)
        metrics.log_scalar("loss", loss / sample_size * bits, sample_size, round=3)
        metrics.log_scalar("nll_loss", nll / tokens * bits, tokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        reduce_expert_log(logging_outputs)


class _FlagsMixin(GateLossMixin):
    """Mixin for criterions without an options dataclass, which add their flags to a parser."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)  # type: ignore[misc]
        gen_parser_from_dataclass(parser, GateLossOptions())


# The MoE variants of the criterions in SPECIAL have additional mixins and attributes.
SPECIAL: dict[str, tuple[tuple[type, ...], dict[str, Any]]] = {
    "cross_entropy": ((_PerplexityMixin, TokenLossMixin), {}),
    "label_smoothed_cross_entropy": ((GateLossMixin, TokenLossMixin), {}),
    "masked_lm": ((_PerplexityMixin,), {"predicted": "sample_size"}),
    # fairseq's speech_dlm_criterion treats every log key that ends with _loss as one of its losses.
    "speech_dlm_criterion": ((GateLossMixin,), {"keeps_loss": False}),
}
# Criterions without a MoE variant. composite_loss adds up losses of --underlying-criterion, which may be a
# MoE variant. The task sentence_ranking requires the criterion sentence_ranking.
# vocab_parallel_cross_entropy needs Megatron.
WITHOUT_VARIANT = ("composite_loss", "sentence_ranking", "vocab_parallel_cross_entropy")


def _register_variants() -> None:
    for name, stock in list(CRITERION_REGISTRY.items()):
        if name.startswith("moe_") or f"moe_{name}" in CRITERION_REGISTRY or name in WITHOUT_VARIANT:
            continue
        options = CRITERION_DATACLASS_REGISTRY.get(name)
        mixins, attributes = SPECIAL.get(name, ((GateLossMixin if options else _FlagsMixin,), {}))
        if options is not None:
            options = variant_of(options, GateLossOptions, module=__name__)
            options = dataclasses.dataclass(options)
        variant = variant_of(stock, *mixins, module=__name__, **attributes)
        register_criterion(f"moe_{name}", dataclass=options)(variant)


_register_variants()
