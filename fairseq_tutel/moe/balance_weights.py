"""The syntax of --moe-balance-loss: "gshard:1,z:0.1"."""

BALANCE_LOSSES = (
    "gshard",
    "gshard_all",
    "gshard_sequence",
    "gshard_global",
    "switch",
    "load_importance",
    "load_importance_tutel",
    "z",
)
# They ask how likely a token would have chosen otherwise, had the gate's noise been drawn again.
NEED_GATE_NOISE = ("load_importance", "load_importance_tutel")
LABEL = "balance_loss (--moe-balance-loss)"


def parse_balance_loss(text: str) -> dict[str, float]:
    """Read "gshard:1,z:0.1" into {"gshard": 1.0, "z": 0.1}; "none" and "" give {}.

    Raises:
        ValueError: unknown name, repeated name or a weight that is no finite number.
    """
    weights: dict[str, float] = {}
    if text.strip() in ("", "none"):
        return weights
    for part in text.split(","):
        name, _, weight = (word.strip() for word in part.partition(":"))
        if name not in BALANCE_LOSSES or name in weights:
            raise ValueError(
                f"{LABEL} is {text!r}: {name!r} is unknown or given twice; use none or a list of "
                f"{', '.join(BALANCE_LOSSES)}, such as gshard:1."
            )
        weights[name] = _finite(weight or "1", text)
    return weights


def _finite(weight: str, text: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{LABEL} is {text!r}: {weight!r} is no weight; write name:number, at least 0."
        )
    return value
