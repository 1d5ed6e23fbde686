"""The options of the converters. This module needs no torch, so that the help of `convert` is fast."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.option import NOT_NEGATIVE, POSITIVE, option

tool = partial(option, of="tool")
# Classes of the MoE layers that may load a converted state dict of Tutel.
TUTEL_LAYERS = ("moe_layer", "MoELayer")


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Options of `convert upcycle` that change the copies of an FFN, or scale the gates."""

    seed: int = tool(1, "random seed for the gates and for all random changes")
    perturb: float = tool(
        0.0,
        "Gaussian noise on the experts' weights: its standard deviation divided by the matrix's",
        rule=NOT_NEGATIVE,
    )
    reinitialize: float = tool(
        0.0,
        "fraction of each expert's hidden units to reinitialize with the mean and deviation of their old "
        "weights (Drop-Upcycling, Nakamura et al. 2025, uses 0.5)",
        rule=(lambda v: 0 <= v <= 1, "give a number from 0 to 1"),
    )
    gate_scale: float = tool(
        1.0,
        "factor for the gates' initial weights; smaller values give more even probabilities",
        rule=POSITIVE,
    )
