"""Every option of one MoE layer: name, type, default, unit, help and validation, written once.

Fields of scope "model" say what is computed and are saved with the model. Fields of scope "system" say
how it is computed and may change between two runs on one checkpoint. The fairseq edge makes its
command-line flags and hydra keys from this dataclass.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from fairseq_tutel.drop_policies import POLICIES

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


def _option(
    default: Any, help: str, *, flag: str | None = None, scope: str = "model", **extra: Any
) -> Any:
    metadata = {"help": help, "flag": flag, "scope": scope, **extra}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of one MoE layer; a bad value raises ValueError naming option, value and fix."""

    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int = _option(
        2, "experts per token, from 1 to the number of experts", flag="--moe-top-k"
    )
    capacity_factor: float = _option(
        0.0,
        "training capacity as a multiple of an even share of the micro-batch: f > 0 gives every expert "
        "top_k * ceil(f * tokens / experts) places, 0 drops nothing, f < 0 takes as many places as "
        "needed but at most those of |f|",
        flag="--moe-capacity-factor",
    )
    eval_capacity_factor: float = _option(
        0.0,
        "capacity factor in evaluation and generation, same rule; 0 drops nothing, so that an output "
        "never depends on what else is in the batch",
        flag="--moe-eval-capacity-factor",
    )
    drop_policy: str = _option(
        "position",
        "who keeps a place when an expert is full: position the earliest tokens, bpr (batch-prioritised "
        "routing) those with the largest probability, rts (random token selection) random ones, in "
        "evaluation the earliest, probability the copies with the largest probability, whatever choice",
        flag="--moe-drop-policy",
        choices=POLICIES,
    )
    gate_type: str = _option(
        "linear",
        "how tokens are scored: linear, or cosine between a projection and one direction per expert",
        flag="--moe-gate-type",
        choices=("linear", "cosine"),
    )
    gate_projection_dim: int = _option(
        256, "dimension of the cosine gate's projection", flag="--moe-gate-projection-dim"
    )
    gate_temperature: float = _option(
        0.5,
        "temperature that the cosine gate begins with and learns from; at least 0.01",
        flag="--moe-gate-temperature",
    )
    gate_noise: float = _option(
        0.0,
        "standard deviation, times the number of experts, of gaussian noise on the logits in training",
        flag="--moe-gate-noise",
    )
    input_jitter: float = _option(
        0.0,
        "in training the gate sees every element times a number uniform in 1 - j to 1 + j",
        flag="--moe-input-jitter",
    )
    input_dropout: float = _option(
        0.0, "dropout of what the gate sees, a probability", flag="--moe-input-dropout"
    )
    gate_fp32: bool = True
    balance_loss: str = _option(
        "gshard:1",
        "balance losses of a layer with their relative weights, name:weight separated by commas, or none; "
        "gshard (load of first choices times mean probability), gshard_all (load of all choices), switch "
        "(the same as gshard), z (squared log of the sum of exponentials of the logits)",
        flag="--moe-balance-loss",
    )
    expert_type: str = _option(
        "ffn",
        "ffn: two linear maps with an activation between; glu: SwiGLU, silu(x W1) * (x W3) then W2",
        flag="--moe-expert-type",
        choices=("ffn", "glu"),
    )
    activation: str = "relu"
    expert_bias: bool = True
    activation_dropout: float = 0.0
    hidden_layer_norm: bool = False
    init_std: float = (
        0.0  # of the experts' weights, normal, biases zero; 0: as nn.Linear draws them
    )
    backend: str = _option(
        "auto",
        "kernels of routing, dispatch and combine: auto takes triton on a GPU where it is installed, "
        "else the plain torch reference",
        flag="--moe-backend",
        scope="system",
        choices=("auto", "reference", "triton"),
    )
    exchange: str = _option(
        "ragged",
        "what crosses ranks: ragged sends only the kept rows, padded sends equal buffers whose size the "
        "ranks agree on; the result is the same",
        flag="--moe-exchange",
        scope="system",
        choices=("ragged", "padded"),
    )

    def __post_init__(self) -> None:
        for name in ("model_dim", "hidden_dim", "num_experts"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and value >= 1,
                f"{_label(name)} is {value}; it must be a whole number, at least 1.",
            )
        _require(
            1 <= self.top_k <= self.num_experts,
            f"{_label('top_k')} is {self.top_k} but there are {self.num_experts} experts; "
            f"choose a value from 1 to {self.num_experts}.",
        )
        for item in fields(self):
            choices = item.metadata.get("choices")
            value = getattr(self, item.name)
            _require(
                choices is None or value in choices,
                f"{_label(item.name)} is {value!r}; choose one of {', '.join(choices or ())}.",
            )
        _require(
            self.activation in ACTIVATIONS,
            f"{_label('activation')} is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}.",
        )
        _require(
            0.0 <= self.activation_dropout < 1.0,
            f"{_label('activation_dropout')} is {self.activation_dropout}; "
            "it is a probability, from 0 to below 1.",
        )
        _require(
            0.0 <= self.init_std < float("inf"),
            f"init_std is {self.init_std}; give a standard deviation, or 0 for nn.Linear's own rule.",
        )
        _require(
            self.gate_projection_dim >= 1,
            f"{_label('gate_projection_dim')} is {self.gate_projection_dim}; give at least 1.",
        )
        _require(
            0.01 <= self.gate_temperature < float("inf"),
            f"{_label('gate_temperature')} is {self.gate_temperature}; give at least 0.01, which is "
            "where the gate stops it.",
        )
        _require(
            0.0 <= self.gate_noise < float("inf"),
            f"{_label('gate_noise')} is {self.gate_noise}; give a finite number, 0 for no noise.",
        )
        for name in ("input_jitter", "input_dropout"):
            _require(
                0.0 <= getattr(self, name) < 1.0,
                f"{_label(name)} is {getattr(self, name)}; give a number from 0 to below 1.",
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            _require(
                abs(getattr(self, name)) < float("inf"),
                f"{_label(name)} is {getattr(self, name)}; it must be a finite number.",
            )
        parse_balance_loss(self.balance_loss)


BALANCE_LOSSES = ("gshard", "gshard_all", "switch", "z")


def parse_balance_loss(text: str) -> dict[str, float]:
    """Read "gshard:1,z:0.1" into {"gshard": 1.0, "z": 0.1}; "none" and "" give {}.

    Raises:
        ValueError: unknown name, repeated name or a weight that is no finite number.
    """
    weights: dict[str, float] = {}
    if text.strip() in ("", "none"):
        return weights
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        _require(
            name in BALANCE_LOSSES and name not in weights,
            f"{_label('balance_loss')} is {text!r}: {name!r} is unknown or given twice; "
            f"use none or a list of {', '.join(BALANCE_LOSSES)}, such as gshard:1.",
        )
        weights[name] = _finite(weight or "1", text)
    return weights


def _finite(weight: str, text: str) -> float:
    label = _label("balance_loss")
    message = f"{label} is {text!r}: {weight!r} is no weight; write name:number, at least 0."
    try:
        value = float(weight)
    except ValueError:
        raise ValueError(message) from None
    _require(0 <= value < float("inf"), message)
    return value


FLAG_OF_FIELD = {
    "model_dim": "--decoder-embed-dim / --encoder-embed-dim",
    "hidden_dim": "--moe-expert-ffn-dim",
    "num_experts": "--moe-expert-count",
    "activation": "--activation-fn",
    "activation_dropout": "--activation-dropout",
    **{item.name: item.metadata["flag"] for item in fields(MoEConfig) if item.metadata.get("flag")},
}


def _label(name: str) -> str:
    flag = FLAG_OF_FIELD.get(name)
    return f"{name} ({flag})" if flag else name


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def options_of_scope(scope: str) -> list[Any]:
    """Return the dataclass fields of MoEConfig that are options of this scope, in order."""
    return [f for f in fields(MoEConfig) if f.metadata.get("scope") == scope]
