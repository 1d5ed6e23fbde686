"""The feed-forward steps in a checkpoint, dense and with experts, by the names of their tensors."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.plugin.feed_forward import label_of
from fairseq_tutel.checkpoint.reading import begun_anew, load, write
from fairseq_tutel.convert.names import model_options

# Of a layer's dense step, without the layer's name: what every one has, and what --scale-fc adds.
DENSE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYER_NORM = ("ffn_layernorm.weight", "ffn_layernorm.bias")
# Of a gate of ours, the tensor with a row per expert.
ROWS = {"linear": "weight", "cosine": "directions"}

_LAYER = re.compile(
    r"\b(?P<name>(?P<side>encoder|decoder|stages\.\d+)(?P<inner>\.sentence_encoder)?"
    r"\.((transformer_)?layers|blocks)\.(?P<index>\d+))\.fc1\.(?P<what>weight|experts\.)"
)


@dataclass(frozen=True, order=True)
class Layer:
    """A layer of a model, ordered as --moe-expert-count orders them: the encoder's first.

    Attributes:
        place: of its side, in the order of sides: of a stage its number from 0.
        index: within its side, from 0.
        side: the side's name, encoder, decoder or, of a Swin, stages.N.
        name: before its tensors, such as decoder.layers.1.
        has_experts: in place of the dense step.
    """

    place: int
    index: int
    side: str
    name: str
    has_experts: bool

    @property
    def step(self) -> str:
        """The name of what stands where fairseq calls fc1."""
        return f"{self.name}.fc1"

    @property
    def label(self) -> str:
        """The layer's name in logs and options, such as decoder_1."""
        return label_of(self.step)


def layers_of(model: Mapping[str, Any], within: bool = False) -> list[Layer]:
    """Return the layers with a feed-forward step, in order; those `within` another model's names too."""
    found = set()
    for key in model:
        if match := (_LAYER.search if within else _LAYER.match)(key):
            # Before roberta's encoder was called so, it was decoder.sentence_encoder.
            side = "encoder" if match["inner"] else match["side"]
            place = int(side.partition(".")[2] or side == "decoder")
            has_experts = match["what"] != "weight"
            name = key[: match.end("name")]
            found.add(Layer(place, int(match["index"]), side, name, has_experts))
    return sorted(found)


def dense_step(model: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """Return the tensors of a dense feed-forward step by their names within the layer.

    Raises:
        ValueError: one is missing.
    """
    step = {key: model.get(f"{layer.name}.{key}") for key in (*DENSE, *LAYER_NORM)}
    missing = [key for key in DENSE if step[key] is None]
    if missing:
        raise ValueError(
            f"--input lacks {layer.name}.{missing[0]}, without which the layer has no feed-forward step of "
            "fairseq's; give a checkpoint of a transformer."
        )
    return {key: tensor for key, tensor in step.items() if tensor is not None}


@dataclass(frozen=True)
class MoEFile:
    """An open checkpoint with experts.

    Attributes:
        state: all of it; tensors stay in the file until they are read.
        layers: those with experts, in order, with what these are.
    """

    state: dict[str, Any]
    layers: dict[Layer, MoEConfig]

    @property
    def model(self) -> dict[str, Tensor]:
        """The state dict of the model."""
        model: dict[str, Tensor] = self.state["model"]
        return model

    def write(self, model: Mapping[str, Tensor], output: Path) -> None:
        """Write the checkpoint with other weights, for a training to begin anew."""
        write(begun_anew({**self.state, "model": dict(model)}), output)


def open_moe(path: Path) -> MoEFile:
    """Open a checkpoint with experts.

    Raises:
        ValueError: no checkpoint, or one without experts or of other ones than its options say.
    """
    state = load(path, "--input")
    options = model_options(state)
    layers = [layer for layer in layers_of(state["model"]) if layer.has_experts]
    if not layers:
        raise ValueError(f"--input names {path}, whose model has no experts; give one that has.")
    return MoEFile(state, {layer: _config_of(options, state["model"], layer) for layer in layers})


def _config_of(saved: Mapping[str, Any], model: Mapping[str, Tensor], layer: Layer) -> MoEConfig:
    """Return what a layer's experts are, by the saved options and the tensors' shapes."""
    from fairseq_tutel.plugin.flags import layer_config

    first = next(iter(experts_of(model, layer).values()))
    hidden = model.get(f"{layer.step}.experts.fc1_weight")
    norm = model.get(
        f"{layer.name}.final_layer_norm.weight", model.get(f"{layer.name}.norm2.weight")
    )
    if norm is None:
        raise ValueError(
            f"--input lacks {layer.name}.final_layer_norm.weight; give a whole checkpoint of a transformer."
        )
    config = layer_config(
        argparse.Namespace(**saved),
        None,
        len(first),
        model_dim=len(norm),
        # A class of the user's own has tensors of its own, and its width where it says.
        hidden_dim=1 if hidden is None else hidden.shape[1],
        hidden_layer_norm=f"{layer.step}.experts.hidden_layer_norm.weight" in model,
    )
    for name in gate_rows(config, layer):
        if name not in model or len(model[name]) != len(first):
            raise ValueError(
                f"--input has {len(first)} experts in {layer.label}, but its {name} is not of as many, as "
                "in a crash file, which holds one rank's experts alone; give a whole checkpoint."
            )
    return config


def gate_rows(config: MoEConfig, layer: Layer) -> list[str]:
    """Return the names of the tensors that hold a row per expert in gates of ours."""
    places = ["gate", *(f"other_gates.{i}" for i in range(len(config.gate_types) - 1))]
    return [
        f"{layer.step}.{place}.{ROWS[kind]}"
        for place, kind in zip(places, config.gate_types, strict=True)
        if kind in ROWS
    ]


def experts_of(model: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """Return the tensors [E, ...] of a layer's experts by their own names."""
    prefix = f"{layer.step}.experts."
    own = {key.removeprefix(prefix): t for key, t in model.items() if key.startswith(prefix)}
    # What all experts share, a layer norm, stands in a module of its own.
    return {name: tensor for name, tensor in own.items() if "." not in name}


def counts_text(counts: list[int]) -> str:
    """Return the experts of all layers as --moe-expert-count has them: one number, or all."""
    return ",".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
