"""Every option of one MoE layer: name, type, default, unit, help and validation, written once.

Fields of scope "model" say what is computed and are saved with the model. Fields of scope "system" say
how it is computed and may change between two runs on one checkpoint. The fairseq edge makes its
command-line flags and hydra keys from this dataclass.
"""

import math
import numbers
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from fairseq_tutel.comm.wire import WIRES
from fairseq_tutel.kernels import BACKENDS
from fairseq_tutel.moe.build import is_custom
from fairseq_tutel.moe.checks import refuse_contradictions
from fairseq_tutel.planning.strategy import ALGORITHMS

ACTIVATIONS = (
    "relu",
    "relu_squared",
    "gelu",
    "gelu_fast",
    "gelu_accurate",
    "tanh",
    "linear",
    "swish",
)
GATE_TYPES = ("linear", "cosine", "hash")
EXPERT_TYPES = ("ffn", "glu")

# A rule: what must hold of a value, and how the sentence that refuses it ends.
Rule = tuple[Callable[[Any], bool], str]
AT_LEAST_1: Rule = (lambda v: is_whole(v) and v >= 1, "give a whole number, at least 1")
AT_LEAST_0: Rule = (lambda v: is_whole(v) and v >= 0, "give a whole number, at least 0")
UP_TO_A_MILLION: Rule = (lambda v: 0 <= v <= 1e6, "give a whole number from 0 to a million")
FROM_1_TO_A_MILLION: Rule = (lambda v: 1 <= v <= 1e6, "give a whole number from 1 to a million")
CAPACITY: Rule = (lambda v: abs(v) <= 1e6, "give a finite number, at most a million")
NOT_NEGATIVE: Rule = (lambda v: 0 <= v < math.inf, "give a finite number, at least 0")
POSITIVE: Rule = (lambda v: 0 < v < math.inf, "give a finite number above 0")
PROBABILITY: Rule = (lambda v: 0 <= v < 1, "give a number from 0 to below 1")
OVERLAP: Rule = (lambda v: 1 <= v <= 32, "give a whole number from 1 to 32")
PARALLEL_TYPE: Rule = (
    lambda v: re.fullmatch(r"adaptive:\d{1,6}|data|model|auto", v) is not None,
    "give adaptive:r with r a whole number, data, model or auto",
)
TEMPERATURE: Rule = (
    lambda v: 0.01 <= v < math.inf,
    "give at least 0.01, which is where the gate stops it",
)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def one_of(names: tuple[str, ...], or_class: bool = False) -> Rule:
    """Return the rule of a name from a list, or, where that is allowed, of a class of the user's."""
    classes = ", or package.module.Class" if or_class else ""
    return (
        lambda v: v in names or (or_class and is_custom(v)),
        f"choose one of {', '.join(names)}{classes}",
    )


def _option(
    default: Any, help: str, *, flag: str | None = None, scope: str = "model", **extra: Any
) -> Any:
    metadata = {"help": help, "flag": flag, "scope": scope, **extra}
    return field(default=default, metadata=metadata)


def _plain(default: Any, rule: Rule | None = None) -> Any:
    """A field that the fairseq edge fills from the stock model's own options."""
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of one MoE layer; a bad value raises ValueError naming option, value and fix."""

    model_dim: int = field(metadata={"rule": AT_LEAST_1})
    hidden_dim: int = field(metadata={"rule": AT_LEAST_1})
    num_experts: int = field(metadata={"rule": AT_LEAST_1})
    top_k: int = _option(
        2,
        "experts per token, from 1 to the number of experts",
        flag="--moe-top-k",
        rule=AT_LEAST_1,
    )
    capacity_factor: float = _option(
        0.0,
        "training capacity as a multiple of an even share of the micro-batch: f > 0 gives every expert "
        "top_k * ceil(f * tokens / experts) places, 0 drops nothing, f < 0 takes as many places as "
        "needed but at most those of |f|",
        flag="--moe-capacity-factor",
        rule=CAPACITY,
    )
    eval_capacity_factor: float = _option(
        0.0,
        "capacity factor in evaluation and generation, same rule; 0 drops nothing, so that an output "
        "never depends on what else is in the batch (under --moe-choice experts 0 is as in training)",
        flag="--moe-eval-capacity-factor",
        rule=CAPACITY,
    )
    eval_capacity_token_fraction: float = _option(
        0.0,
        "places per expert in evaluation as a fraction of the micro-batch's tokens, rounded up; below 0: "
        "capacity as in training; 0: by --moe-eval-capacity-factor",
        flag="--moe-eval-capacity-token-fraction",
        rule=CAPACITY,
    )
    min_capacity: int = _option(
        0,
        "places per expert at least, where the capacity is limited; in tokens",
        flag="--moe-min-capacity",
        rule=UP_TO_A_MILLION,
    )
    capacity_multiple: int = _option(
        1,
        "a limited capacity is rounded up to a multiple of this; in tokens",
        flag="--moe-capacity-multiple",
        rule=FROM_1_TO_A_MILLION,
    )
    drop_policy: str = _option(
        "position",
        "who keeps a place when an expert is full: position the earliest tokens, bpr (batch-prioritised "
        "routing) those with the largest probability, rts (random token selection) random ones, in "
        "evaluation the earliest, probability the copies with the largest probability, whatever choice",
        flag="--moe-drop-policy",
        choices=("position", "bpr", "rts", "probability"),
    )
    choice: str = _option(
        "tokens",
        "who chooses: tokens their experts, or experts their tokens (expert choice: every expert takes "
        "the top_k * ceil(f * tokens / experts) tokens that score highest, f = 1 where the capacity "
        "factor is 0; a token's experts then depend on later tokens, so it is not for causal models)",
        flag="--moe-choice",
        choices=("tokens", "experts"),
    )
    gate_type: str = _option(
        "linear",
        "how tokens are scored: linear, cosine (between a projection and one direction per expert), hash "
        "(of the token's id, without parameters), or package.module.Class of your own; several, "
        "separated by commas, are gates on the same experts",
        flag="--moe-gate-type",
    )
    gate_index: int = _option(
        0,
        "which of several gates is used, from 0",
        flag="--moe-gate-index",
        rule=AT_LEAST_0,
    )
    gate_projection_dim: int = _option(
        256,
        "dimension of the cosine gate's projection",
        flag="--moe-gate-projection-dim",
        rule=AT_LEAST_1,
    )
    gate_temperature: float = _option(
        0.5,
        "temperature that the cosine gate begins with and learns from; at least 0.01",
        flag="--moe-gate-temperature",
        rule=TEMPERATURE,
    )
    score_function: str = _option(
        "softmax",
        "what makes scores of logits: softmax over the experts, or sigmoid of each",
        flag="--moe-score-function",
        choices=("softmax", "sigmoid"),
    )
    normalize_gate: str = _option(
        "before",
        "divide the weights of a token's experts by their sum, where top_k > 1: before dropping, after "
        "it (over those that are left), or none",
        flag="--moe-normalize-gate",
        choices=("before", "after", "none"),
    )
    routed_scaling_factor: float = _option(
        1.0,
        "what all weights are multiplied with in the end",
        flag="--moe-routed-scaling-factor",
        rule=POSITIVE,
    )
    prescore: bool = _option(
        False, "weights multiply what experts read, not what they give", flag="--moe-prescore"
    )
    expert_groups: int = _option(
        1,
        "groups of neighbouring experts; a token chooses its groups first (by the sum of the best "
        "top_k / groups-per-token scores in each), then experts in them alone",
        flag="--moe-expert-groups",
        rule=AT_LEAST_1,
    )
    groups_per_token: int = _option(
        1,
        "groups of experts that a token may choose from",
        flag="--moe-groups-per-token",
        rule=AT_LEAST_1,
    )
    second_expert_policy: str = _option(
        "all",
        "every choice after the first: all by its score, sampling from the other experts' scores in "
        "training, random takes it in training with a probability of top_k times its weight",
        flag="--moe-second-expert-policy",
        choices=("all", "sampling", "random"),
    )
    rsample: bool = _option(
        False,
        "in training choose experts by sampling (Gumbel noise on the choice); weights stay without noise",
        flag="--moe-rsample",
    )
    sinkhorn: bool = _option(
        False,
        "in training choose experts by Sinkhorn's balanced scores, which spread a micro-batch's tokens "
        "evenly; weights stay the scores",
        flag="--moe-sinkhorn",
    )
    gate_noise: float = _option(
        0.0,
        "standard deviation, times the number of experts, of gaussian noise on the logits in training",
        flag="--moe-gate-noise",
        rule=NOT_NEGATIVE,
    )
    input_jitter: float = _option(
        0.0,
        "in training the gate sees every element times a number uniform in 1 - j to 1 + j",
        flag="--moe-input-jitter",
        rule=PROBABILITY,
    )
    input_dropout: float = _option(
        0.0,
        "dropout of what the gate sees, a probability",
        flag="--moe-input-dropout",
        rule=PROBABILITY,
    )
    gate_fp32: bool = True
    balance_loss: str = _option(
        "gshard:1",
        "balance losses of a layer with their relative weights, name:weight separated by commas, or none; "
        "gshard (load of first choices times mean probability), gshard_all (load of all choices), "
        "gshard_sequence (that, sentence by sentence), gshard_global (that, with the load of all "
        "ranks), switch (the same as gshard), load_importance (variation of the experts' summed "
        "probabilities and of their load; needs --moe-gate-noise), load_importance_tutel (the same in "
        "Tutel's form), z (squared log of the sum of exponentials of the logits)",
        flag="--moe-balance-loss",
    )
    balance_bias: bool = _option(
        False,
        "balance by a bias on the choice, not on the weights, that rises for idle experts and falls "
        "for busy ones after every update",
        flag="--moe-balance-bias",
    )
    bias_update_rate: float = _option(
        0.001,
        "step of the balance bias per update, in units of scores; 0 freezes it",
        flag="--moe-bias-update-rate",
        rule=NOT_NEGATIVE,
    )
    expert_type: str = _option(
        "ffn",
        "ffn: two linear maps with an activation between; glu: SwiGLU, silu(x W1) * (x W3) then W2; or "
        "package.module.Class of your own, a torch module that is one expert",
        flag="--moe-expert-type",
        rule=one_of(EXPERT_TYPES, or_class=True),
    )
    shared_experts: int = _option(
        0,
        "experts that every token goes through beside its own, added to their output",
        flag="--moe-shared-experts",
        rule=AT_LEAST_0,
    )
    residual: bool = _option(
        False,
        "residual MoE: beside the experts a dense feed-forward network of their size, the two outputs "
        "mixed by a learned softmax",
        flag="--moe-residual",
    )
    expert_grad_norm: str = _option(
        "world_size",
        "what the experts' summed gradients are divided by on several ranks: world_size, as all others, "
        "or sqrt_world_size",
        flag="--moe-normalize-expert-grad",
        choices=("world_size", "sqrt_world_size"),
    )
    activation: str = _plain("relu", one_of(ACTIVATIONS))
    expert_bias: bool = _plain(True)
    activation_dropout: float = _plain(0.0, PROBABILITY)
    hidden_layer_norm: bool = _plain(False)
    # Of the experts' weights, normal, biases zero; 0: as nn.Linear draws them.
    init_std: float = _plain(0.0, NOT_NEGATIVE)
    backend: str = _option(
        "auto",
        "kernels of routing, dispatch, experts and combine: auto takes triton on a GPU where it is "
        "installed, else the plain torch reference; grouped_mm is auto with torch's products of experts",
        flag="--moe-backend",
        scope="system",
        choices=BACKENDS,
    )
    recompute_experts: bool = _option(
        False,
        "keep no hidden layer of the experts for backward, which makes it again: less memory for more "
        "work; the result is the same",
        flag="--moe-recompute-experts",
        scope="system",
    )
    kernel_tuning_seconds: float = _option(
        3.0,
        "seconds that a process may spend in all on measuring which configuration of a kernel is fastest "
        "on its GPU, compilation included; what it finds is kept for later processes; 0 takes the "
        "defaults; the result is the same to rounding; the environment variable FAIRSEQ_TUTEL_TUNE_SECONDS "
        "goes before",
        flag="--moe-kernel-tuning-seconds",
        scope="system",
        rule=NOT_NEGATIVE,
    )
    exchange: str = _option(
        "ragged",
        "what crosses ranks: ragged sends only the kept rows, padded sends equal buffers whose size the "
        "ranks agree on; the result is the same",
        flag="--moe-exchange",
        scope="system",
        choices=("ragged", "padded"),
    )
    a2a_algorithm: str = _option(
        "linear",
        "how rows cross ranks: linear, every rank sends to every other; 2dh, 2-D hierarchical, within the "
        "node first: fewer, larger messages, which pays on many nodes and needs experts over several "
        "whole ones; auto, what a model of the cluster expects to be faster; the result is the same",
        flag="--moe-a2a-algorithm",
        scope="system",
        choices=(*ALGORITHMS, "auto"),
    )
    a2a_dtype: str = _option(
        "same",
        "dtype of rows while they cross ranks: same, bf16, or fp8 with a scale for every row; the "
        "narrow ones lose digits",
        flag="--moe-a2a-dtype",
        scope="system",
        choices=WIRES,
    )
    a2a_ffn_overlap_degree: int = _option(
        1,
        "chunks of rows that cross ranks while the experts work on others, 1 to 32; the result is the same",
        flag="--moe-a2a-ffn-overlap-degree",
        scope="system",
        rule=OVERLAP,
    )
    parallel_type: str = _option(
        "adaptive:1",
        "how ranks share the experts: adaptive:r with r as in --moe-adaptive-r; data, the same as "
        "adaptive:1; model, r as large as it can be; auto, r by measuring; the result is the same",
        flag="--moe-parallel-type",
        scope="system",
        rule=PARALLEL_TYPE,
    )
    adaptive_r: int = _option(
        -1,
        "ranks that get a row, each with that part of its expert's hidden dimension, where ranks are more "
        "than experts: 0 (gather all experts everywhere, send no row) or a divisor of the ranks per "
        "expert, more count as that; -1: by --moe-parallel-type; the result is the same",
        flag="--moe-adaptive-r",
        scope="system",
        rule=(lambda v: -1 <= v <= 1e6, "give a whole number, at least -1"),
    )
    adaptive: str = _option(
        "off",
        "auto: choose --moe-adaptive-r, --moe-a2a-ffn-overlap-degree and --moe-a2a-algorithm by measuring "
        "updates; off: as they are given",
        flag="--moe-adaptive",
        scope="system",
        choices=("off", "auto"),
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            choices, value = item.metadata.get("choices"), getattr(self, item.name)
            rule = one_of(choices) if choices else item.metadata.get("rule")
            shown = repr(value) if isinstance(value, str) else value
            if not _is_of_type(value, item.type):
                raise ValueError(f"{label_of(item.name)} is {value!r}; give {KINDS[item.type]}.")
            if rule is not None and not rule[0](value):
                raise ValueError(f"{label_of(item.name)} is {shown}; {rule[1]}.")
            if item.type in (int, float) and not isinstance(value, int | float):  # NumPy's
                object.__setattr__(self, item.name, item.type(value))
        for name in self.gate_types:
            holds, otherwise = one_of(GATE_TYPES, or_class=True)
            if not holds(name):
                raise ValueError(f"{label_of('gate_type')} is {self.gate_type!r}; {otherwise}.")
        refuse_contradictions(self, label_of)

    @property
    def gate_types(self) -> list[str]:
        """The gates by name, in the order of their index."""
        return [name.strip() for name in self.gate_type.split(",")]


FLAG_OF_FIELD = {
    "model_dim": "--decoder-embed-dim / --encoder-embed-dim",
    "hidden_dim": "--moe-expert-ffn-dim",
    "num_experts": "--moe-expert-count",
    "activation": "--activation-fn",
    "activation_dropout": "--activation-dropout",
    **{item.name: item.metadata["flag"] for item in fields(MoEConfig) if item.metadata.get("flag")},
}


# Of a field's type, what a bad value should have been.
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
}


def _is_of_type(value: Any, kind: Any) -> bool:
    if kind is int:
        return is_whole(value)
    return is_number(value) if kind is float else isinstance(value, kind)


def label_of(name: str) -> str:
    """Return how messages name an option: its field, and its flag where it has one."""
    flag = FLAG_OF_FIELD.get(name)
    return f"{name} ({flag})" if flag else name


def options_of_scope(scope: str) -> list[Any]:
    """Return the dataclass fields of MoEConfig that are options of this scope, in order."""
    return [f for f in fields(MoEConfig) if f.metadata.get("scope") == scope]
