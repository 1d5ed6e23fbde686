"""Checks: options of a layer that exclude each other, each refused by one sentence; --moe-balance-loss."""

import re
from typing import Any

from fairseq_tutel.moe.options import options_in


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(message)


def refuse_contradictions(config: Any) -> None:
    """Refuse options of a MoEConfig, good one by one, that do not go together.

    Raises:
        ValueError: naming option, value and fix.
    """
    label = {option.name: option.label for option in options_in(type(config))}
    experts, groups, kept = config.num_experts, config.expert_groups, config.groups_per_token
    require(
        1 <= config.top_k <= experts,
        f"{label['top_k']} is {config.top_k} but there are {experts} experts; choose a value from 1 to "
        f"{experts}.",
    )
    require(
        experts % groups == 0,
        f"{label['expert_groups']} is {groups}, which does not divide the {experts} experts; give a "
        "divisor.",
    )
    require(
        kept <= groups and kept * (experts // groups) >= config.top_k,
        f"{label['groups_per_token']} is {kept} of {groups} groups of {experts // groups} experts; give at "
        f"most {groups}, and enough for {config.top_k} experts per token.",
    )
    gates = len(config.gate_types)
    require(
        config.gate_index < gates,
        f"{label['gate_index']} is {config.gate_index} but there is no such gate among {gates}; choose "
        f"from 0 to {gates - 1}.",
    )
    fraction = config.eval_capacity_token_fraction
    require(
        fraction == 0 or config.eval_capacity_factor == 0,
        f"{label['eval_capacity_token_fraction']} is {fraction} beside --moe-eval-capacity-factor; give "
        "one of them.",
    )
    choosers = [name for name in ("balance_bias", "rsample", "sinkhorn") if getattr(config, name)]
    if config.second_expert_policy == "sampling":
        choosers.append("second_expert_policy")
    ways = [f"{label[name]} is {getattr(config, name)}" for name in choosers]
    require(len(ways) < 2, f"{' and '.join(ways[:2])}, two ways to choose experts; keep one.")
    losses = parse_balance_loss(config.balance_loss)
    needs_noise = any(name in losses for name in NEED_GATE_NOISE)
    require(
        not needs_noise or config.gate_noise > 0,
        f"{label['balance_loss']} is {config.balance_loss!r} but there is no noise to weigh a load by; "
        "set --moe-gate-noise, such as 1.",
    )
    require(
        not needs_noise or config.choice == "tokens",
        f"{label['balance_loss']} is {config.balance_loss!r} but experts choose their tokens (--moe-choice "
        "experts), all the same number; give z or none.",
    )


# The functions are balance.py's; what a name stands for, the option's help tells.
BALANCE_LOSSES = {
    "gshard": "load of first choices times mean probability",
    "gshard_all": "load of all choices",
    "gshard_sequence": "that, sentence by sentence",
    "gshard_global": "that, with the load of all ranks",
    "switch": "the same as gshard",
    "load_importance": "variation of the experts' summed probabilities and of their load; needs "
    "--moe-gate-noise",
    "load_importance_tutel": "the same in Tutel's form",
    "z": "squared log of the sum of exponentials of the logits",
}
# They ask how likely a token would have chosen otherwise, had the gate's noise been drawn again.
NEED_GATE_NOISE = ("load_importance", "load_importance_tutel")


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
        require(
            name in BALANCE_LOSSES and name not in weights,
            f"balance_loss (--moe-balance-loss) is {text!r}: {name!r} is unknown or given twice; use none "
            f"or a list of {', '.join(BALANCE_LOSSES)}, such as gshard:1.",
        )
        weights[name] = _finite(weight or "1", text)
    return weights


def _finite(weight: str, text: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    require(
        0 <= value < float("inf"),
        f"balance_loss (--moe-balance-loss) is {text!r}: {weight!r} is no weight; write name:number, at "
        "least 0.",
    )
    return value


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CACHE_SIZE = re.compile(r"(?P<experts>\d+)|(?P<size>\d+(?:\.\d+)?) *(?P<unit>[KMG]i?B)")
CACHE_SIZES = (
    "give a number of experts, such as 64, or of bytes with a unit, such as 512MiB "
    f"({', '.join(UNITS)})"
)


def is_cache_size(text: str) -> bool:
    """Whether `cache_limits` can read it."""
    return CACHE_SIZE.fullmatch(text.strip()) is not None


def cache_limits(cache: int | str) -> tuple[int | None, int | None]:
    """Return (most bytes, most experts) of a cache, one of them None.

    Args:
        cache: a number of experts, or of bytes with one of UNITS.

    Raises:
        ValueError: it is neither.
    """
    found = CACHE_SIZE.fullmatch(str(cache).strip())
    if found is None:
        raise ValueError(f"cache (--moe-expert-cache) is {cache!r}; {CACHE_SIZES}.")
    if found["experts"]:
        return None, int(found["experts"])
    return int(float(found["size"]) * UNITS[found["unit"]]), None
