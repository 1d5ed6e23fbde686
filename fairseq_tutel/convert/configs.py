"""Helper functions of the converters, for example to read MoE configurations and rename MoE variants."""

import argparse
import copy
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import Layer, SavedModel, Weights
from fairseq_tutel.files import printable
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.plugin.install import chosen_layers

Tensors = dict[str, Tensor]
# For each type of gate, the names of the gate tensors that have one row per expert.
ROWS = {"linear": ("weight",), "biased": ("weight", "bias"), "cosine": ("directions",)}
FFN = re.compile(r"(.+?)\.(?:fc1|fc2|ffn_layernorm)\.")
SWIN = "swin_v2"  # The MoE variant of swin_v2 is swin_v2_moe.


def configs_of(saved: SavedModel) -> dict[Layer, MoEConfig]:
    """Return the configuration of each MoE layer of a checkpoint, in the order of the model's layers.

    Raises:
        ValueError: the checkpoint has no MoE layers, or its weights and options are inconsistent.
    """
    layers = [layer for layer in saved.layers if layer.has_experts]
    if not layers:
        raise ValueError(f"{saved.flag} names {saved.path}, whose model has no experts; give a MoE model.")
    return {layer: _config_of(saved, layer) for layer in layers}


def _config_of(saved: SavedModel, layer: Layer) -> MoEConfig:
    from fairseq_tutel.plugin.registration.flags import layer_config

    weights, num_experts = saved.weights, saved.num_experts(layer)
    hidden = weights.get(f"{layer.moe}.experts.fc1_weight")
    norms = (f"{layer.name}.{name}.weight" for name in ("final_layer_norm", "norm2"))
    norm = next((weights[name] for name in norms if name in weights), None)
    if norm is None:
        raise ValueError(
            f"INPUT lacks {layer.name}.final_layer_norm.weight; give a complete transformer checkpoint."
        )
    config = layer_config(
        argparse.Namespace(**saved.options),
        None,
        num_experts,
        model_dim=norm.shape[0],
        # Custom experts have no tensor fc1_weight.
        hidden_dim=1 if hidden is None else hidden.shape[1],
        hidden_layer_norm=f"{layer.moe}.experts.hidden_layer_norm.weight" in weights,
    )
    for name in gate_rows(config, layer):
        if name not in weights or weights[name].shape[0] != num_experts:
            raise ValueError(
                f"INPUT has {num_experts} experts in {layer.label}, but {name} has a different number of "
                "rows. A file saved at a crash holds only one rank's experts; give a complete checkpoint."
            )
    return config


def gate_rows(config: MoEConfig, layer: Layer) -> list[str]:
    """Return the names of a layer's gate tensors with one row per expert, except for custom gates."""
    places = ["gate", *(f"other_gates.{i}" for i in range(len(config.gate_types) - 1))]
    return [
        f"{layer.moe}.{place}.{key}"
        for place, kind in zip(places, config.gate_types, strict=True)
        for key in ROWS.get(str(kind), ())
    ]


def per_expert(saved: SavedModel, layer: Layer, config: MoEConfig) -> list[str]:
    """Return the names of a MoE layer's tensors whose first dimension is the number of experts."""
    names = [f"{layer.moe}.experts.{name}" for name in saved.stacks(layer)]
    names += gate_rows(config, layer)
    bias = f"{layer.moe}.balance_bias.bias"
    return [*names, bias] if bias in saved.weights else names


def counts_text(counts: Sequence[int]) -> str:
    """Return the value of --moe-expert-count for a list with the number of experts of each MoE layer."""
    return ",".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))


def freq_of(places: Sequence[int], count: int, preferred: int = 0) -> int | None:
    """Return a --moe-freq that selects exactly the layers `places` of `count` layers; None if none does."""
    freqs = (preferred, *range(count + 1))
    return next((f for f in freqs if chosen_layers(range(count), f) == list(places)), None)


def replaced(saved: SavedModel, made: Mapping[Layer, Tensors]) -> Tensors:
    """Return the model's weights in the same order, with new FFN tensors in some layers.

    `made` maps each changed layer to its new FFN tensors by name.
    """
    layers, weights = {layer.name: layer for layer in made}, {}
    for key, tensor in saved.weights.items():
        match = FFN.match(key)
        if match is None or match[1] not in layers:
            weights[key] = tensor
        else:
            weights |= {f"{match[1]}.{name}": own for name, own in made[layers[match[1]]].items()}
    return weights


def with_experts(name: str) -> str:
    """Return the name of the MoE variant of a fairseq model, task, criterion or optimizer."""
    return name.replace(SWIN, f"{SWIN}_moe", 1) if name.startswith(SWIN) else f"moe_{name}"


def without_experts(name: str) -> str:
    """Return the fairseq name of a model, task, criterion or optimizer, given its MoE variant's name."""
    return name.removeprefix("moe_").replace(f"{SWIN}_moe", SWIN)


def new_checkpoint(
    words: Sequence[str], options: Mapping[str, Any], weights: Weights, task_state: dict[str, Any]
) -> SavedModel:
    """Return a checkpoint with options from fairseq-train arguments (`words`), overridden by `options`."""
    plugin.register()
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    arguments = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), ["", *words])
    vars(arguments).update(options)
    logging.getLogger("hydra").setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq calls deprecated hydra functions.
        made = convert_namespace_to_omegaconf(arguments)
    cfg = OmegaConf.to_container(made, resolve=True, enum_to_str=True)
    saved = SavedModel({"args": None, "cfg": cfg, "task_state": task_state})
    saved.restart(weights)
    return saved


def task_of(saved: SavedModel, changed: Mapping[str, Any]) -> Any:
    """Return the fairseq task of a checkpoint, with its dictionaries; `changed` overrides saved options."""
    from fairseq.tasks import setup_task

    options = {**copy.deepcopy(saved.options_of("task")), **changed}
    options["task"] = without_experts(saved.name("task"))
    logger = logging.getLogger("fairseq")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return setup_task(argparse.Namespace(**options))
    finally:
        logger.setLevel(level)


def refuse_other_rows(saved: SavedModel, source: Sized, target: Sized) -> None:
    """Raise ValueError if an embedding table does not have one row for each symbol of its dictionary."""
    for side, dictionary in ("encoder", source), ("decoder", target):
        for name, table in saved.weights.items():
            is_table = name.startswith(side) and name.endswith("embed_tokens.weight")
            if is_table and len(table) != len(dictionary):
                raise ValueError(
                    f"{saved.flag} has {len(table)} rows in {name}, but the dictionary of the converted "
                    f"model has {len(dictionary)} symbols; give the dictionary of this model."
                )


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on a conversion, one note per line."""
    for note in notes:
        print(printable(f"note: {note}".replace("\n", "\\n")))


def use_moe_variants(saved: SavedModel) -> str:
    """Rename architecture, task, criterion and optimizer to MoE variants, and return the new architecture.

    Raises:
        ValueError: the architecture has no MoE variant.
    """
    plugin.register()
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.optim import OPTIMIZER_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    registries: dict[str, dict[str, Any]] = {
        "model": ARCH_MODEL_REGISTRY,
        "task": TASK_REGISTRY,
        "criterion": CRITERION_REGISTRY,
        "optimizer": OPTIMIZER_REGISTRY,
    }
    for part, registry in registries.items():
        name = saved.name(part)
        if with_experts(name) in registry:
            saved.rename(part, with_experts(name))
        elif part == "model":
            raise ValueError(
                f"{saved.flag} holds a model of the architecture {name or 'without a name'}, which has no "
                "MoE variant; give a checkpoint of a transformer_lm, transformer, roberta, bart, wav2vec2 "
                "or swin_v2 architecture."
            )
    return saved.name("model")
