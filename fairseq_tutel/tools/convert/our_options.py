"""Our options of a model, as a checkpoint has them: defaults, and what other systems cannot compute."""

from typing import Any

from fairseq_tutel.moe.config import options_of
from fairseq_tutel.moe.options import plain

Options = dict[str, Any]

# Keys of what says how experts are computed and logged here, and nowhere else.
RUN_OPTIONS = [
    option.key for part in ("task", "criterion") for option in options_of(part) if not option.metas
]


def our_defaults() -> Options:
    """Return our options of a model with their defaults."""
    return {option.key: option.default for option in options_of("model")}


def top_k_of(ours: Options) -> int:
    """Return K of a model of ours, all of whose options are given."""
    return 1 if ours["moe_top1_expert"] else int(ours["moe_top_k"])


def refuse(option: str, value: Any, layer: str) -> None:
    """Refuse a model that another system cannot compute.

    Args:
        option: that it was trained with.
        value: of it.
        layer: whose layer has no counterpart: Meta's, Tutel's.
    """
    raise ValueError(
        f"the model was trained with {option} {value}, which {layer} layer has no counterpart of; convert "
        "a model without it."
    )


def refuse_what_only_ours_compute(ours: Options, layer: str) -> None:
    """Refuse options without which a model would compute something else, in evaluation too."""
    for option in options_of("model"):
        value = plain(ours[option.key])
        if option.common is not None and not option.common(value):
            refuse(option.flag, value, layer)
