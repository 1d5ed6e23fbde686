"""The options of fairseq models and criterions, and the list of all options by owner."""

from dataclasses import dataclass
from typing import Any

from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.moe.config import LAYER
from fairseq_tutel.option import (
    AT_LEAST_0,
    NOT_NEGATIVE,
    PROBABILITY,
    Option,
    Rule,
    balance,
    capacity,
    experts,
    option,
    options_in,
    routing,
    whole,
)
from fairseq_tutel.plugin.training.options import PreemptionConfig, TaskConfig

SIDE_FREQ: Rule = (whole(-1)[0], "give a whole number of layers, at least 0, or -1 for --moe-freq")
FRACTION: Rule = (lambda v: 0 <= v <= 1, "give a number from 0 to 1")


def older(name: str, value: Any) -> Any:
    """Define the option of a deprecated flag, which sets a MoEConfig field to a fixed value."""
    flag = f"--moe-{name.replace('_', '-')}"
    help = f"the same as `{flag} {value}`"
    return option(False, help, theme="Older names", of="model", same_as=(name, value))


def accepted(default: Any, reason: str, **parts: Any) -> Any:
    """Define an option that has no effect, and that older command lines may contain."""
    help = f"no effect, because {reason}; accepted for older command lines"
    return option(default, help, theme="Older names", of="model", **parts)


@dataclass(frozen=True)
class ModelConfig:
    """Model options that are not in MoEConfig: the layers that have experts, and deprecated names."""

    # fmt: off
    moe_freq: int = experts(
        2, unit="layers", rule=whole(0, unit="layers"),
        help="layer i (from 0) is a MoE layer if (i + 1) % moe_freq == 0; 0: no MoE layer",
    )
    moe_expert_count: str = experts(
        "8",
        help='number of experts of every MoE layer, over all ranks, or one number per MoE layer, such as '
        '"8,8,16" (encoder layers first)',
    )
    moe_expert_ffn_dim: int = experts(
        0, rule=(AT_LEAST_0[0], "give the experts' hidden dimension, or 0 for the layer's FFN dimension"),
        help="hidden dimension of an expert; 0 uses the FFN dimension of the layer",
    )
    moe_pregate: int = routing(
        0, unit="MoE layers", rule=whole(0, unit="MoE layers"),
        help="pre-gating: a gate reads the input of the MoE layer that is this many MoE layers earlier, so "
        "that experts can be fetched early; the gates of the first MoE layers read their own layer's "
        "input; 0: off",
    )
    moe_local_drop: float = routing(
        0.0, rule=PROBABILITY,
        help="gating dropout: probability per training update that a MoE layer sends no rows to other "
        "ranks; each rank then uses its own experts in place of the other ranks' experts",
    )
    moe_eval_capacity_max_seqlen: bool = capacity(
        False,
        help="let --moe-eval-capacity-token-fraction count every sentence as --max-source-positions "
        "tokens (encoder) or --max-target-positions tokens (decoder)",
    )
    moe_top1_expert: bool = older("top_k", 1)
    moe_gating_use_fp32: bool = accepted(False, "the gate and its softmax are in fp32 by default")
    no_moe_gating_use_fp32: bool = routing(False, "compute the gate and its softmax in the model's dtype")
    moe_batch_prioritized_routing: bool = older("drop_policy", "bpr")
    moe_normalize_gate_prob_before_dropping: bool = older("normalize_gate", "before")
    use_moe_pad_mask: bool = accepted(False, "padding is never routed")
    num_workers_valid: int = accepted(
        -1, "validation uses --num-workers processes",
    )
    # fmt: on


@dataclass(frozen=True)
class SidesConfig:
    """The options that encoder-decoder models have in addition to ModelConfig."""

    # fmt: off
    encoder_moe_freq: int = experts(
        -1, unit="layers", rule=SIDE_FREQ,
        help="--moe-freq of the encoder; -1: the value of --moe-freq",
    )
    decoder_moe_freq: int = experts(
        -1, unit="layers", rule=SIDE_FREQ,
        help="--moe-freq of the decoder; -1: the value of --moe-freq",
    )
    moe_pregate_sides: str = routing(
        "both", choices=("both", "encoder", "decoder"),
        help="side of the model to which --moe-pregate applies",
    )
    # fmt: on


@dataclass(frozen=True)
class CriterionConfig:
    """Options that set how a criterion combines and weighs the balance loss and the budget loss."""

    # fmt: off
    moe_gate_loss_wt: float = balance(
        0.01, of="criterion",
        rule=(NOT_NEGATIVE[0], "give a finite number, at least 0 (0 disables the balance loss)"),
        help="weight w of the balance loss; the criterion adds w * sample size * balance loss to its loss",
    )
    moe_gate_loss_combine_method: str = balance(
        "average", of="criterion", choices=("average", "sum"),
        help="whether the criterion uses the average or the sum of the layers' balance losses",
    )
    moe_gate_loss_transform: str = balance(
        "none", of="criterion", choices=("none", "neg_log"),
        help="transform of the combined balance loss x; neg_log: -log(x); none: x",
    )
    cmr_gate_loss_wt: float = balance(
        0.0, of="criterion", rule=NOT_NEGATIVE,
        help="weight w of the budget loss |g - p| of --moe-cmr, where g is the mean gate over all tokens "
        "and layers, and p is --cmr-gate-loss-p; the criterion adds w * sample size * budget loss to its "
        "loss",
    )
    cmr_gate_loss_p: float = balance(
        1.0, of="criterion", rule=FRACTION,
        help="target p of the budget loss for the mean gate of --moe-cmr; the gate is the share of the "
        "output that comes from experts",
    )
    # fmt: on


BY_OWNER = {
    "model": (*options_in(ModelConfig), *LAYER.values(), *options_in(SidesConfig)),
    "task": (
        *options_in(TaskConfig),
        *options_in(PreemptionConfig),
        *options_in(StoreConfig),
        *LAYER.values(),
    ),
    "criterion": options_in(CriterionConfig),
}


def options_of(owner: str) -> list[Option]:
    """Return all options of an owner ("model", "task" or "criterion"), in the order of definition."""
    return [item for item in BY_OWNER[owner] if item.of == owner]
