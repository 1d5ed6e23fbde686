"""fairseq's dataclasses, made from MoEConfig: command-line flags and hydra keys are never typed twice.

`ModelOptions` become fields of every MoE model, `SystemOptions` of every task; `layer_config` turns a
model's and a task's configuration back into the MoEConfig of one layer.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_tutel.moe.config import FLAG_OF_FIELD, MoEConfig, options_of_scope


def key_of(flag: str) -> str:
    """Return the configuration key of a flag: --moe-top-k -> moe_top_k."""
    return flag.removeprefix("--").replace("-", "_")


def _generated(scope: str) -> list[tuple[str, Any, Any]]:
    """Return (key, type, dataclass field) of every MoEConfig option of this scope."""
    made = []
    for option in options_of_scope(scope):
        choices = option.metadata.get("choices")
        # One choice is none yet: a plain string, which MoEConfig checks by name.
        kind = ChoiceEnum(list(choices)) if choices and len(choices) > 1 else option.type
        text = option.metadata["help"]
        if choices and len(choices) == 1:
            text += f" (the one choice so far: {choices[0]})"
        metadata = {"help": f"{text} [default: {option.default}]"}
        made.append(
            (
                key_of(option.metadata["flag"]),
                kind,
                field(default=option.default, metadata=metadata),
            )
        )
    return made


@dataclass
class _ModelOptions(FairseqDataclass):
    moe_freq: int = field(
        default=2,
        metadata={
            "help": "layer i (from 0) is a MoE layer when (i + 1) %% moe_freq == 0; in layers "
            "[default: 2]"
        },
    )
    moe_expert_count: str = field(
        default="8",
        metadata={
            "help": 'experts of a MoE layer, over all ranks: one number, or one per MoE layer, as "8,8,16"'
            " (encoder layers first) [default: 8]"
        },
    )
    moe_expert_ffn_dim: int = field(
        default=0,
        metadata={
            "help": "hidden dimension of one expert; 0 takes the layer's own FFN dimension [default: 0]"
        },
    )
    moe_top1_expert: bool = field(
        default=False,
        metadata={"help": "one expert per token: the same as --moe-top-k 1 [default: off]"},
    )
    moe_gating_use_fp32: bool = field(
        default=False,
        metadata={
            "help": "gate and softmax in fp32: already the default, accepted for older command lines "
            "[default: off, fp32 all the same]"
        },
    )
    no_moe_gating_use_fp32: bool = field(
        default=False,
        metadata={"help": "gate and softmax in the model's own dtype [default: off]"},
    )
    moe_batch_prioritized_routing: bool = field(
        default=False, metadata={"help": "the same as --moe-drop-policy bpr [default: off]"}
    )
    moe_normalize_gate_prob_before_dropping: bool = field(
        default=False,
        metadata={
            "help": "the same as --moe-normalize-gate before: already the default, accepted for older "
            "command lines [default: off, before all the same]"
        },
    )
    use_moe_pad_mask: bool = field(
        default=False,
        metadata={
            "help": "do not route padding: always so, accepted for older command lines "
            "[default: off, not routed all the same]"
        },
    )
    num_workers_valid: int = field(
        default=-1,
        metadata={
            "help": "accepted for older command lines; validation loads by --num-workers processes "
            "[default: -1]"
        },
    )


@dataclass
class _SystemOptions(FairseqDataclass):
    moe_expert_parallel_size: int = field(
        default=0,
        metadata={
            "help": "ranks that share one set of experts and exchange tokens; it must divide the number "
            "of ranks, and every layer's experts or be a multiple of them; 0 takes the greatest common "
            "divisor in a training, and 1, all experts on every rank, where a model is used; in ranks "
            "[default: 0]"
        },
    )
    moe_local_size: int = field(
        default=0,
        metadata={
            "help": "ranks of a node, for --moe-a2a-algorithm; 0 takes what torchrun, OpenMPI or Slurm "
            "says; in ranks [default: 0]"
        },
    )
    moe_use_2dh: bool = field(
        default=False, metadata={"help": "the same as --moe-a2a-algorithm 2dh [default: off]"}
    )
    moe_machine_file: str = field(
        default="",
        metadata={
            "help": "what `python -m fairseq_tutel tune` measured, for --moe-a2a-algorithm auto; empty: "
            "typical numbers of the device [default: empty]"
        },
    )
    moe_adaptive_file: str = field(
        default="",
        metadata={
            "help": "where --moe-adaptive auto keeps what it found, for the next run; empty: "
            "moe_adaptive.json in --save-dir [default: empty]"
        },
    )
    moe_adaptive_window: int = field(
        default=128,
        metadata={
            "help": "--moe-adaptive auto chooses anew for every window of capacities, as wide as this at "
            "least and as a quarter of where it begins; in places of an expert [default: 128]"
        },
    )
    moe_checkpoint: ChoiceEnum(["full", "sharded"]) = field(  # type: ignore[valid-type]
        default="full",
        metadata={
            "help": "full: rank 0 gathers all experts into one file; sharded: every rank writes its own "
            "into the folder experts of --save-dir, and the file says where; any run reads both "
            "[default: full]"
        },
    )
    moe_zero_stage: int = field(
        default=0,
        metadata={
            "help": "what ranks with the same parameters keep a part of each: 0 nothing, 1 the optimizer's "
            "state (and fp32 masters), 2 gradients too, reduced during the backward; experts "
            "among their replicas, all else among all ranks; the result is the same [default: 0]"
        },
    )
    moe_offload_optimizer: bool = field(
        default=False,
        metadata={
            "help": "keep the optimizer's state and fp32 masters in host memory, and update there; the "
            "result is the same [default: off]"
        },
    )
    moe_comm_timeout: int = field(
        default=1800,
        metadata={
            "help": "how long a collective waits for another rank before the job ends with an error that "
            "names it; 0 leaves torch's own limits; in seconds [default: 1800]"
        },
    )
    record_a2a_perf_stats: bool = field(
        default=False,
        metadata={
            "help": "log the time of the row exchanges of an update as all_to_all_cpu_time_ms and, on "
            "a GPU, all_to_all_cuda_time_ms; in milliseconds; waits for the GPU once a micro-batch "
            "[default: off]"
        },
    )


ModelOptions = dataclasses.make_dataclass(
    "ModelOptions", _generated("model"), bases=(_ModelOptions,), namespace={"__module__": __name__}
)
SystemOptions = dataclasses.make_dataclass(
    "SystemOptions",
    _generated("system"),
    bases=(_SystemOptions,),
    namespace={"__module__": __name__},
)


@dataclass
class EncoderDecoderOptions(ModelOptions):  # type: ignore[valid-type,misc]
    """ModelOptions with a frequency for each side."""

    encoder_moe_freq: int = field(
        default=-1,
        metadata={
            "help": "--moe-freq of the encoder alone; 0: no MoE layer there; -1: as --moe-freq; "
            "in layers [default: -1]"
        },
    )
    decoder_moe_freq: int = field(
        default=-1,
        metadata={
            "help": "--moe-freq of the decoder alone; 0: no MoE layer there; -1: as --moe-freq; "
            "in layers [default: -1]"
        },
    )


def defaults(options: type) -> dict[str, Any]:
    """Return every key of an options dataclass with its default."""
    return {f.name: f.default for f in dataclasses.fields(options) if f.name != "_name"}


def meant(key: str, *options: type) -> str | None:
    """Return the key of these options dataclasses that another one, which is none of them, resembles."""
    known = {name for each in options for name in defaults(each)}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    return close[0] if close and key not in known else None


def refuse_misspelt(overrides: dict[str, Any]) -> None:
    """Refuse a key of --model-overrides that is none, but like one; stock would pass over it.

    Raises:
        ValueError: naming both.
    """
    for key in overrides:
        close = meant(key, EncoderDecoderOptions, SystemOptions)
        if close:
            raise ValueError(
                f"--model-overrides has {key!r}, which is no option; did you mean {close!r}?"
            )


def fill_in(args: Any, options: type) -> None:
    """Give a model's arguments the default of every option that they lack, in place."""
    for key, value in defaults(options).items():
        setattr(args, key, getattr(args, key, value))


def expert_counts(text: str, num_layers: int) -> list[int]:
    """Read --moe-expert-count for `num_layers` MoE layers.

    Raises:
        ValueError: no positive whole numbers, or neither one nor one per layer.
    """
    try:
        counts = [int(part) for part in str(text).split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(
            f"--moe-expert-count is {text!r}; give a number of experts of at least 1, or one per MoE "
            'layer, such as 8 or "8,8,16".'
        )
    if len(counts) == 1:
        return counts * num_layers
    if len(counts) != num_layers:
        raise ValueError(
            f"--moe-expert-count is {text!r}, {len(counts)} numbers for {num_layers} MoE layers; give "
            f"one number or {num_layers}."
        )
    return counts


def layer_config(model_cfg: Any, task_cfg: Any, num_experts: int, **layer: Any) -> MoEConfig:
    """Return one layer's MoEConfig.

    Args:
        model_cfg: configuration that has ModelOptions' keys (a saved one may lack newer keys).
        task_cfg: configuration that may have SystemOptions' keys (one saved or made by hand may lack some).
        num_experts: experts of this layer.
        layer: what the layer itself says: model_dim, hidden_dim, activation, ….
    """
    if model_cfg.moe_expert_ffn_dim < 0:
        raise ValueError(
            f"--moe-expert-ffn-dim is {model_cfg.moe_expert_ffn_dim}; give the experts' hidden "
            "dimension, or 0 for the layer's own."
        )
    values = {}
    for scope, cfg in (("model", model_cfg), ("system", task_cfg)):
        for option in options_of_scope(scope):
            values[option.name] = getattr(cfg, key_of(option.metadata["flag"]), option.default)
    if model_cfg.moe_top1_expert:
        if values["top_k"] not in (1, MoEConfig.top_k):
            raise ValueError(
                f"--moe-top1-expert and --moe-top-k {values['top_k']} are both given; drop one of them."
            )
        values["top_k"] = 1
    if model_cfg.moe_gating_use_fp32 and model_cfg.no_moe_gating_use_fp32:
        raise ValueError(
            "--moe-gating-use-fp32 and --no-moe-gating-use-fp32 are both given; drop one of them."
        )
    for key, name, value in (
        ("moe_batch_prioritized_routing", "drop_policy", "bpr"),
        ("moe_normalize_gate_prob_before_dropping", "normalize_gate", "before"),
        ("moe_use_2dh", "a2a_algorithm", "2dh"),
    ):
        if getattr(model_cfg, key, False) or getattr(task_cfg, key, False):
            values[name] = _alias(key, name, value, str(values[name]))
    values["gate_fp32"] = not model_cfg.no_moe_gating_use_fp32
    values["hidden_dim"] = model_cfg.moe_expert_ffn_dim or layer.pop("hidden_dim")
    layer.pop("hidden_dim", None)
    # fairseq's choices are enumerations of their own.
    values = {key: v.value if isinstance(v, Enum) else v for key, v in values.items()}
    return MoEConfig(num_experts=num_experts, **values, **layer)


def _alias(key: str, name: str, value: str, given: str) -> str:
    """Return the value that an older name stands for; refuse it beside another one."""
    if given not in (value, getattr(MoEConfig, name)):
        raise ValueError(
            f"--{key.replace('_', '-')} and {FLAG_OF_FIELD[name]} {given} are both given; drop one of them."
        )
    return value
