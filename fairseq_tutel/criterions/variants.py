"""A moe_ twin, with the balance loss, of every stock criterion that has none of its own here."""

import dataclasses
from typing import Any

from fairseq.criterions import (
    CRITERION_DATACLASS_REGISTRY,
    CRITERION_REGISTRY,
    register_criterion,
)
from fairseq.dataclass.utils import gen_parser_from_dataclass

from fairseq_tutel.criterions.gate_loss import GateLossMixin
from fairseq_tutel.plugin import twin_of
from fairseq_tutel.plugin.registration.flags import GateLossOptions

# The first hands a stand-in of the model to another criterion, which may be a twin; the task of the second
# insists on its name; the third needs Megatron.
WITHOUT_TWIN = ("composite_loss", "sentence_ranking", "vocab_parallel_cross_entropy")

# These take any key that ends with _loss for one of theirs.
TAKE_ANY_LOSS = ("speech_dlm_criterion",)


class _FlagsMixin(GateLossMixin):
    """Goes before a criterion without a dataclass, whose configuration is the whole command line."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and those of the balance loss."""
        super().add_args(parser)  # type: ignore[misc]
        gen_parser_from_dataclass(parser, GateLossOptions())


def _register_twins() -> None:
    for name, stock in list(CRITERION_REGISTRY.items()):
        if (
            issubclass(stock, GateLossMixin)
            or f"moe_{name}" in CRITERION_REGISTRY
            or name in WITHOUT_TWIN
        ):
            continue
        options = CRITERION_DATACLASS_REGISTRY.get(name)
        if options is not None:
            options = dataclasses.make_dataclass(
                f"MoE{options.__name__}", [], bases=(GateLossOptions, options)
            )
        mixin, keeps_loss = GateLossMixin if options else _FlagsMixin, name not in TAKE_ANY_LOSS
        twin = twin_of(stock, mixin, module=__name__, keeps_loss=keeps_loss)
        register_criterion(f"moe_{name}", dataclass=options)(twin)


_register_twins()
