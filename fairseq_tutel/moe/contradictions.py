"""Refuses combinations of a layer's options that contradict each other."""

from typing import Any

from fairseq_tutel.moe.balance_options import NEED_GATE_NOISE, parse_balance_loss
from fairseq_tutel.options.option import options_in


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def refuse_contradictions(config: Any) -> None:
    """Refuse options of a MoEConfig that are valid each but contradict each other.

    Raises:
        ValueError: names the option, the value and the fix.
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
        f"{label['gate_index']} is {config.gate_index}, but the number of gates is {gates}; choose "
        f"from 0 to {gates - 1}.",
    )
    fraction = config.eval_capacity_token_fraction
    require(
        fraction == 0 or config.eval_capacity_factor == 0,
        f"{label['eval_capacity_token_fraction']} is {fraction} together with --moe-eval-capacity-factor; "
        "give one of them.",
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
        f"{label['balance_loss']} is {config.balance_loss!r}, which needs gate noise; set "
        "--moe-gate-noise, such as 1.",
    )
    require(
        not needs_noise or config.choice == "tokens",
        f"{label['balance_loss']} is {config.balance_loss!r} but experts choose their tokens (--moe-choice "
        "experts), all the same number; give z or none.",
    )
