"""The option --moe-balance-loss: names and help of the balance losses, and the parser of its value.

`moe/balance.py` computes the losses. This module needs no torch, so that the tools' help is fast.
"""

import math
from typing import Any, NamedTuple

from fairseq_tutel.option import option, require


class BalanceLoss(NamedTuple):
    """The properties of a balance loss."""

    help: str
    # The loss uses the probability that a token chooses an expert if the gate's noise is drawn again.
    needs_gate_noise: bool = False


# By the name in --moe-balance-loss.
BALANCE_LOSSES = {
    "gshard": BalanceLoss("fraction of first choices times mean probability, summed over experts"),
    "gshard_all": BalanceLoss("gshard with the fraction of all choices"),
    "gshard_sequence": BalanceLoss("gshard_all per sentence"),
    "gshard_global": BalanceLoss("gshard_all with the fraction over all ranks"),
    "switch": BalanceLoss("alias of gshard"),
    "load_importance": BalanceLoss(
        "variation of the experts' summed probabilities and of the experts' loads; needs --moe-gate-noise",
        needs_gate_noise=True,
    ),
    "load_importance_tutel": BalanceLoss("Tutel's variant of load_importance", needs_gate_noise=True),
    "z": BalanceLoss("squared logarithm of the sum of the logits' exponentials"),
}


def balance_loss_option() -> Any:
    """Return the definition of the command-line option --moe-balance-loss."""
    known = ", ".join(f"{name} ({loss.help})" for name, loss in BALANCE_LOSSES.items())
    return option(
        "gshard:1",
        theme="Balance",
        of="model",
        help="balance losses of a layer and their relative weights, as name:weight separated by commas, or "
        f"none; {known}",
    )


def parse_balance_loss(text: str) -> dict[str, float]:
    """Parse loss weights: "gshard:1,z:0.1" gives {"gshard": 1.0, "z": 0.1}, "none" and "" give {}."""
    weights: dict[str, float] = {}
    for part in text.split(",") if text.strip() not in ("", "none") else ():
        name, _, weight = (word.strip() for word in part.partition(":"))
        require(
            name in BALANCE_LOSSES and name not in weights,
            f"balance_loss (--moe-balance-loss) is {text!r}: {name!r} is unknown or given twice; give "
            f"none, or a list of {', '.join(BALANCE_LOSSES)}, such as gshard:1.",
        )
        try:
            weights[name] = float(weight or "1")
        except ValueError:
            weights[name] = math.nan
        require(
            0 <= weights[name] < math.inf,
            f"balance_loss (--moe-balance-loss) is {text!r}: {weight!r} is not a valid weight; give "
            "name:number with a number of at least 0.",
        )
    return weights
