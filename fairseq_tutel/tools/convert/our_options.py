"""Our options of a model, as a checkpoint has them: defaults, and what other systems cannot compute."""

from typing import Any

from fairseq_tutel.moe.config import options_of_scope

Options = dict[str, Any]

# What says how experts are computed and logged here: options of our tasks and criterions.
RUN_OPTIONS = (
    *(option.metadata["flag"][2:].replace("-", "_") for option in options_of_scope("system")),
    "moe_expert_parallel_size",
    "moe_local_size",
    "moe_use_2dh",
    "moe_machine_file",
    "moe_adaptive_file",
    "moe_adaptive_window",
    "moe_checkpoint",
    "moe_comm_timeout",
    "moe_log_layers",
    "moe_offload_optimizer",
    "moe_zero_stage",
)

# Options that other systems' layers lack; True where the value is what those compute.
ONLY_HERE = {
    "moe_gate_type": lambda v: v == "linear",
    "moe_score_function": lambda v: v == "softmax",
    "moe_choice": lambda v: v == "tokens",
    "moe_prescore": lambda v: not v,
    "moe_expert_groups": lambda v: v == 1,
    "moe_balance_bias": lambda v: not v,
    "moe_expert_type": lambda v: v == "ffn",
    "moe_shared_experts": lambda v: v == 0,
    "moe_residual": lambda v: not v,
    "moe_routed_scaling_factor": lambda v: 0 < v <= 1,
}


def flag(key: str) -> str:
    """Return the option of a key."""
    return "--" + key.replace("_", "-")


def plain(value: Any) -> Any:
    """Return a value without fairseq's enumeration around it."""
    return getattr(value, "value", value)


def our_defaults() -> Options:
    """Return our options of a model with their defaults, those of flags.py that MoEConfig lacks too."""
    generated = {
        option.metadata["flag"][2:].replace("-", "_"): option.default
        for option in options_of_scope("model")
    }
    return {
        **generated,
        "moe_freq": 2,
        "moe_expert_count": "8",
        "moe_expert_ffn_dim": 0,
        "moe_top1_expert": False,
        "moe_gating_use_fp32": False,
        "no_moe_gating_use_fp32": False,
        "moe_batch_prioritized_routing": False,
        "moe_normalize_gate_prob_before_dropping": False,
        "use_moe_pad_mask": False,
        "num_workers_valid": -1,
        "encoder_moe_freq": -1,
        "decoder_moe_freq": -1,
    }


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
    for key, is_common in ONLY_HERE.items():
        if not is_common(plain(ours[key])):
            refuse(flag(key), plain(ours[key]), layer)
