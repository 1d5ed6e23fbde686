"""A checkpoint with experts as the tools have it: its layers, with what their experts are."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools.convert.files import load
from fairseq_tutel.tools.convert.layers import Layer, layers_of
from fairseq_tutel.tools.convert.new_start import begun_anew
from fairseq_tutel.tools.convert.options import model_options

# Of a gate of ours, the tensor with a row per expert.
ROWS = {"linear": "weight", "cosine": "directions"}


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

    def with_model(self, model: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the checkpoint with other weights, for a training to begin anew."""
        return begun_anew({**self.state, "model": dict(model)})

    def set_counts(self, counts: list[int], top_k: int | None) -> None:
        """Let the options say how many experts the layers have, and, where it is given, a token."""
        options = model_options(self.state)
        options["moe_expert_count"] = counts_text(counts)
        if top_k is not None:
            options.update(moe_top_k=top_k, moe_top1_expert=False)


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
    return MoEFile(state, {layer: config_of(options, state["model"], layer) for layer in layers})


def config_of(saved: Mapping[str, Any], model: Mapping[str, Tensor], layer: Layer) -> MoEConfig:
    """Return what a layer's experts are, by the saved options and the tensors' shapes.

    Raises:
        ValueError: options that do not go together, or tensors that are not of one layer.
    """
    from fairseq_tutel.plugin.flags import EncoderDecoderOptions, defaults, layer_config

    first = next(iter(experts_of(model, layer).values()))
    hidden = model.get(f"{layer.step}.experts.fc1_weight")
    norm = model.get(f"{layer.name}.final_layer_norm.weight")
    if norm is None:
        raise ValueError(
            f"--input lacks {layer.name}.final_layer_norm.weight; give a whole checkpoint of a transformer."
        )
    config = layer_config(
        argparse.Namespace(**{**defaults(EncoderDecoderOptions), **saved}),
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
    names = {key: key.removeprefix(prefix) for key in model if key.startswith(prefix)}
    # What all experts share, a layer norm, stands in a module of its own.
    return {name: model[key] for key, name in names.items() if "." not in name}


def counts_text(counts: list[int]) -> str:
    """Return the experts of all layers as --moe-expert-count has them: one number, or all."""
    return ",".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
