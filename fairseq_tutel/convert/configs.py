"""The configurations of a saved model's MoE layers."""

import argparse
from collections.abc import Sequence

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.moe.config import MoEConfig

# The tensor with a row per expert, by type of gate.
ROWS = {"linear": "weight", "cosine": "directions"}


def configs_of(saved: SavedModel) -> dict[Layer, MoEConfig]:
    """Return the MoE layers of a checkpoint, in order, with their configurations.

    Raises:
        ValueError: there are none, or weights and options do not fit together.
    """
    layers = [layer for layer in saved.layers if layer.has_experts]
    if not layers:
        raise ValueError(f"{saved.flag} names {saved.path}, whose model has no experts; give one that has.")
    return {layer: _config_of(saved, layer) for layer in layers}


def _config_of(saved: SavedModel, layer: Layer) -> MoEConfig:
    from fairseq_tutel.plugin.registration.flags import layer_config

    weights, num_experts = saved.weights, saved.num_experts(layer)
    hidden = weights.get(f"{layer.moe}.experts.fc1_weight")
    norms = (f"{layer.name}.{name}.weight" for name in ("final_layer_norm", "norm2"))
    norm = next((weights[name] for name in norms if name in weights), None)
    if norm is None:
        raise ValueError(
            f"--input lacks {layer.name}.final_layer_norm.weight; give a whole checkpoint of a transformer."
        )
    config = layer_config(
        argparse.Namespace(**saved.options),
        None,
        num_experts,
        model_dim=norm.shape[0],
        # Custom experts have other tensors.
        hidden_dim=1 if hidden is None else hidden.shape[1],
        hidden_layer_norm=f"{layer.moe}.experts.hidden_layer_norm.weight" in weights,
    )
    for name in gate_rows(config, layer):
        if name not in weights or weights[name].shape[0] != num_experts:
            raise ValueError(
                f"--input has {num_experts} experts in {layer.label}, but its {name} has another number of "
                "rows, as in a crash file, which holds the experts of one rank; give a whole checkpoint."
            )
    return config


def gate_rows(config: MoEConfig, layer: Layer) -> list[str]:
    """Return the names of the built-in gates' tensors that have a row per expert."""
    places = ["gate", *(f"other_gates.{i}" for i in range(len(config.gate_types) - 1))]
    return [
        f"{layer.moe}.{place}.{ROWS[kind]}"
        for place, kind in zip(places, config.gate_types, strict=True)
        if kind in ROWS
    ]


def counts_text(counts: Sequence[int]) -> str:
    """Return numbers of experts as a value of --moe-expert-count: one number, or one per layer."""
    return ",".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
