"""A dense checkpoint made into a MoE checkpoint: options, weights and, where asked for, moments."""

import argparse
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.plugin.feed_forward import chosen_layers
from fairseq_tutel.tools.convert.layers import DENSE, LAYER_NORM, Layer, dense_step, layers_of
from fairseq_tutel.tools.convert.new_start import begun_anew
from fairseq_tutel.tools.convert.options import model_options, name_of, rename
from fairseq_tutel.tools.convert.upcycle_layer import Variation, moe_tensors
from fairseq_tutel.tools.convert.upcycle_optimizer import copied_state


def give_options(state: dict[str, Any], given: Mapping[str, Any]) -> dict[Layer, MoEConfig]:
    """Make a dense checkpoint's options those of a MoE model; return which layers get which experts.

    Args:
        state: whose options are changed in place; task, criterion and optimizer get the names of their
            twins too.
        given: the experts' options by their keys; the others are the defaults.

    Raises:
        ValueError: a model that has no twin, or options that it cannot have.
    """
    from fairseq.models import ARCH_CONFIG_REGISTRY

    from fairseq_tutel.plugin.flags import (
        EncoderDecoderOptions,
        ModelOptions,
        defaults,
        expert_counts,
    )
    from fairseq_tutel.plugin.install import refuse_options

    model, options = state["model"], model_options(state)
    layers = layers_of(model)
    if any(layer.has_experts for layer in layers):
        raise ValueError("--input has experts already; give the checkpoint of a dense model.")
    arch = _take_names_of_twins(state)
    known = defaults(EncoderDecoderOptions if _has_two_sides(layers) else ModelOptions)
    for key in sorted(set(given) - set(known)):
        raise ValueError(
            f"--{key.replace('_', '-')} is given, but {arch} has one side; give --moe-freq instead."
        )
    options.update({key: getattr(v, "value", v) for key, v in known.items()} | dict(given))
    args = argparse.Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)  # what an older file leaves to the architecture's name
    refuse_options(args)
    chosen = _chosen(args, layers)
    counts = expert_counts(args.moe_expert_count, len(chosen))
    return {
        layer: _config_of(args, dense_step(model, layer), count)
        for layer, count in zip(chosen, counts, strict=True)
    }


def _take_names_of_twins(state: dict[str, Any]) -> str:
    """Rename what has a twin that knows experts, and return the architecture's.

    Raises:
        ValueError: the architecture has none.
    """
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.optim import OPTIMIZER_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    registries = {
        "model": ARCH_MODEL_REGISTRY,
        "task": TASK_REGISTRY,
        "criterion": CRITERION_REGISTRY,
        "optimizer": OPTIMIZER_REGISTRY,
    }
    for part, registry in registries.items():
        name = name_of(state, part)
        if f"moe_{name}" in registry:
            rename(state, part, f"moe_{name}")
        elif part == "model":
            raise ValueError(
                f"--input holds a model of the architecture {name}, which has no twin with experts; give a "
                "checkpoint of a transformer_lm, transformer, roberta or bart architecture of fairseq's."
            )
    return name_of(state, "model")


def _has_two_sides(layers: list[Layer]) -> bool:
    return len({layer.side for layer in layers}) == 2


def _chosen(args: argparse.Namespace, layers: list[Layer]) -> list[Layer]:
    """Return the layers that get experts.

    Raises:
        ValueError: a negative frequency, or no layer.
    """
    found: list[Layer] = []
    for side in dict.fromkeys(layer.side for layer in layers):
        own = getattr(args, f"{side}_moe_freq") if _has_two_sides(layers) else -1
        freq = args.moe_freq if own == -1 else own
        if freq < 0:
            raise ValueError(
                f"--moe-freq of the {side} is {freq}; give a whole number of layers, at least 0."
            )
        of_side = [layer for layer in layers if layer.side == side]
        found += [of_side[i] for i in chosen_layers(range(len(of_side)), freq)]
    if not found:
        raise ValueError(
            f"--moe-freq is {args.moe_freq}, by which none of {len(layers)} layers gets experts; give a "
            "number from 1 to the layers of a side."
        )
    return found


def _config_of(args: argparse.Namespace, ffn: Mapping[str, Tensor], num_experts: int) -> MoEConfig:
    from fairseq_tutel.plugin.flags import layer_config

    hidden_dim, model_dim = ffn["fc1.weight"].shape
    return layer_config(
        args,
        None,
        num_experts,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        activation=str(getattr(args, "activation_fn", "relu")),
        hidden_layer_norm=LAYER_NORM[0] in ffn,
    )


def upcycled(
    state: Mapping[str, Any],
    layers: Mapping[Layer, MoEConfig],
    how: Variation,
    copies_optimizer: bool,
) -> dict[str, Any]:
    """Return the MoE checkpoint.

    Args:
        state: the dense one, with the options of the MoE model.
        layers: which layers get which experts.
        how: copies are made to differ.
        copies_optimizer: keep moments and the place in the data; else a training begins anew with it.

    Raises:
        ValueError: experts that no copies can be, or an optimizer state that cannot be copied.
    """
    dense = state["model"]
    model = _weights(dense, layers, how)
    made = {**state, "model": model}
    if not copies_optimizer:
        return begun_anew(made)
    optimizer = copied_state(dense, state.get("last_optimizer_state"), model, layers)
    *earlier, last = state["optimizer_history"]
    return {
        **made,
        "last_optimizer_state": optimizer,
        "optimizer_history": [*earlier, _with_classes_of_twins(last, made)],
        # An average of earlier weights that has no experts is left out.
        "extra_state": {k: v for k, v in state["extra_state"].items() if not k.startswith("ema")},
    }


def _weights(
    dense: Mapping[str, Tensor], layers: Mapping[Layer, MoEConfig], how: Variation
) -> dict[str, Tensor]:
    """Return the MoE model's state dict, in its order."""
    made: dict[str, Tensor] = {}
    steps = {f"{layer.name}.{DENSE[0]}": (layer, config) for layer, config in layers.items()}
    replaced = {f"{layer.name}.{key}" for layer in layers for key in (*DENSE, *LAYER_NORM)}
    for key, tensor in dense.items():
        if key in steps:
            layer, config = steps[key]
            step = moe_tensors(dense_step(dense, layer), config, layer.step, how)
            made |= {f"{layer.step}.{name}": value for name, value in step.items()}
        elif key not in replaced:
            made[key] = tensor
    return made


def _with_classes_of_twins(entry: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the history by which fairseq takes the optimizer for the same.

    It compares the names of classes; a wrapper's for half precision stays.
    """
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.optim import OPTIMIZER_REGISTRY

    renamed = dict(entry)
    for part, registry in (("criterion", CRITERION_REGISTRY), ("optimizer", OPTIMIZER_REGISTRY)):
        twin, key = name_of(state, part), f"{part}_name"
        stock = registry.get(twin.removeprefix("moe_"))
        if stock is not None and renamed.get(key) == stock.__name__:
            renamed[key] = registry[twin].__name__
    return renamed
