"""The options of a model that are not options of its MoE layers, and older flags."""

from dataclasses import dataclass
from typing import Any

from fairseq_tutel.options.option import AT_LEAST_0, Rule, because, experts, option, routing, whole


def older(name: str, value: Any, of: str = "model") -> Any:
    """Return the option of an older flag that sets a field of MoEConfig to a value."""
    flag = f"--moe-{name.replace('_', '-')}"
    help = f"the same as {flag} {value}"
    return option(False, help, theme="Older names", of=of, same_as=(name, value))


def accepted(default: Any, reason: str, **parts: Any) -> Any:
    """Return an option without effect that older command lines may contain."""
    help = f"accepted for older command lines: {reason}"
    return option(default, help, theme="Older names", of="model", **parts)


@dataclass(frozen=True)
class ModelConfig:
    """The options of a model in addition to the MoEConfig of its layers: MoE layers and older names."""

    moe_freq: int = experts(
        2,
        "layer i (from 0) is a MoE layer if (i + 1) % moe_freq == 0; 0: no MoE layer",
        unit="layers",
        rule=whole(0, unit="layers"),
        no_effect=(
            because(
                lambda f: -1 not in (f.sides.encoder_moe_freq, f.sides.decoder_moe_freq),
                "--encoder-moe-freq and --decoder-moe-freq are given",
            ),
        ),
    )
    moe_expert_count: str = experts(
        "8",
        'experts per MoE layer, over all ranks: one number, or one per MoE layer, such as "8,8,16" '
        "(encoder layers first)",
    )
    moe_expert_ffn_dim: int = experts(
        0,
        "hidden dimension of an expert; 0 uses the FFN dimension of the layer",
        rule=(
            AT_LEAST_0[0],
            "give the experts' hidden dimension, or 0 for the layer's FFN dimension",
        ),
    )
    moe_pregate: int = routing(
        0,
        "pre-gating: a MoE layer's gate reads the input of the MoE layer this many before it in its "
        "stack, so that its experts can be fetched ahead; gates without such a layer read their own "
        "input; 0: off",
        unit="MoE layers",
        rule=whole(0, unit="MoE layers"),
    )
    moe_top1_expert: bool = older("top_k", 1)
    moe_gating_use_fp32: bool = accepted(False, "the gate and its softmax are in fp32 by default")
    no_moe_gating_use_fp32: bool = routing(False, "compute the gate and its softmax in the model's dtype")
    moe_batch_prioritized_routing: bool = older("drop_policy", "bpr")
    moe_normalize_gate_prob_before_dropping: bool = older("normalize_gate", "before")
    use_moe_pad_mask: bool = accepted(False, "padding is never routed")
    num_workers_valid: int = accepted(
        -1,
        "validation uses --num-workers processes",
        no_effect=(because(lambda f: True, "validation uses --num-workers processes"),),
    )


SIDE_FREQ: Rule = (whole(-1)[0], "give a whole number of layers, at least 0, or -1 for --moe-freq")


@dataclass(frozen=True)
class SidesConfig:
    """The options of an encoder-decoder model in addition to ModelConfig."""

    encoder_moe_freq: int = experts(
        -1,
        "--moe-freq for the encoder; 0: no MoE layer in it; -1: as --moe-freq",
        unit="layers",
        rule=SIDE_FREQ,
    )
    decoder_moe_freq: int = experts(
        -1,
        "--moe-freq for the decoder; 0: no MoE layer in it; -1: as --moe-freq",
        unit="layers",
        rule=SIDE_FREQ,
    )
