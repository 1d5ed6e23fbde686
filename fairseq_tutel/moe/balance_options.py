"""The balance losses by name (their functions are in balance.py), and the criterion's options for them."""

import math
from dataclasses import dataclass

from fairseq_tutel.options.option import NOT_NEGATIVE, balance, because, logging, require

BALANCE_LOSSES = {
    "gshard": "fraction of first choices times mean probability, summed over experts",
    "gshard_all": "the same with the fraction of all choices",
    "gshard_sequence": "gshard_all per sentence",
    "gshard_global": "gshard_all with the fraction over all ranks",
    "switch": "alias of gshard",
    "load_importance": "variation of the experts' summed probabilities and of their load; needs "
    "--moe-gate-noise",
    "load_importance_tutel": "load_importance in Tutel's form",
    "z": "squared logarithm of the sum of the logits' exponentials",
}
# The load in these losses: the probability that a token chooses an expert if gate noise is drawn again.
NEED_GATE_NOISE = {"load_importance", "load_importance_tutel"}
NO_BALANCE_LOSS = because(
    lambda f: f.layer.balance_loss.strip() in ("", "none"), "--moe-balance-loss is none"
)


@dataclass(frozen=True)
class CriterionConfig:
    """Options that set how a criterion uses the balance losses, which the model's options choose."""

    # fmt: off
    moe_gate_loss_wt: float = balance(
        0.01, of="criterion",
        rule=(NOT_NEGATIVE[0], "give a finite number, at least 0, which is for no balance loss"),
        no_effect=(NO_BALANCE_LOSS,),
        help="weight of the balance loss per unit of sample size; 0 trains without it",
    )
    moe_gate_loss_combine_method: str = balance(
        "average", of="criterion", choices=("average", "sum"), no_effect=(NO_BALANCE_LOSS,),
        help="how the balance losses of the layers are combined",
    )
    moe_gate_loss_transform: str = balance(
        "none", of="criterion", choices=("none", "neg_log"), no_effect=(NO_BALANCE_LOSS,),
        help="function applied to the combined balance loss: none, or neg_log for -log",
    )
    moe_log_layers: bool = logging(
        False, of="criterion",
        help="log every MoE layer's metrics and every expert's load as scalars for TensorBoard and Weights "
        "& Biases",
    )
    # fmt: on


def parse_balance_loss(text: str) -> dict[str, float]:
    """Parse "gshard:1,z:0.1" to {"gshard": 1.0, "z": 0.1}, "none" and "" to {}, or raise ValueError."""
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
