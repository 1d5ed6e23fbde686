"""A moe_ variant, with the balance loss, of every fairseq criterion without a class of its own here."""

import dataclasses
from typing import Any

from fairseq.criterions import (
    CRITERION_DATACLASS_REGISTRY,
    CRITERION_REGISTRY,
    register_criterion,
)
from fairseq.dataclass.utils import gen_parser_from_dataclass

from fairseq_tutel.criterions.gate_loss import GateLossMixin
from fairseq_tutel.plugin.registration.flags import GateLossOptions
from fairseq_tutel.plugin.registration.variants import variant_of

# The first passes a substitute of the model to another criterion, which may be a variant. The task of the
# second requires its name. The third needs Megatron.
WITHOUT_VARIANT = ("composite_loss", "sentence_ranking", "vocab_parallel_cross_entropy")

# These treat any key that ends with _loss as their own.
TAKE_ANY_LOSS = ("speech_dlm_criterion",)


class _FlagsMixin(GateLossMixin):
    """Precedes a criterion without a dataclass, whose configuration is the whole command line."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and those of the balance loss."""
        super().add_args(parser)  # type: ignore[misc]
        gen_parser_from_dataclass(parser, GateLossOptions())


def _register_variants() -> None:
    for name, stock in list(CRITERION_REGISTRY.items()):
        if (
            issubclass(stock, GateLossMixin)
            or f"moe_{name}" in CRITERION_REGISTRY
            or name in WITHOUT_VARIANT
        ):
            continue
        options = CRITERION_DATACLASS_REGISTRY.get(name)
        if options is not None:
            options = dataclasses.make_dataclass(
                f"MoE{options.__name__}", [], bases=(GateLossOptions, options)
            )
        mixin, keeps_loss = GateLossMixin if options else _FlagsMixin, name not in TAKE_ANY_LOSS
        variant = variant_of(stock, mixin, module=__name__, keeps_loss=keeps_loss)
        register_criterion(f"moe_{name}", dataclass=options)(variant)


_register_variants()
