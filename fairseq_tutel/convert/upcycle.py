"""Makes a MoE checkpoint of a dense one: experts are copies of an FFN, and gates are initialized.

Source: Komatsuzaki et al. 2022 (Sparse Upcycling). With a --moe-expert-ffn-dim below the FFN's, an expert
is a part of the FFN (He et al. 2024).
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.saved import LAYER_NORM, Layer, SavedModel
from fairseq_tutel.convert.configs import SWIN, replaced, use_moe_variants
from fairseq_tutel.convert.upcycle_layer import Variation, moe_tensors
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.options.option import flag_of, options_in, read, refuse_bad_values
from fairseq_tutel.plugin.feed_forward import SIDES, chosen_layers
from fairseq_tutel.vision.options import SwinExpertsConfig

SWIN_KEYS = [option.key for option in options_in(SwinExpertsConfig)]


def upcycle(saved: SavedModel, given: Mapping[str, Any], how: Variation) -> dict[Layer, MoEConfig]:
    """Replace FFNs by experts, in place; needs `plugin.register()`.

    Args:
        saved: a dense checkpoint.
        given: options of the experts, by their keys; others have their defaults.
        how: how the copies differ.

    Returns:
        The MoE layers with their configurations.

    Raises:
        ValueError: it is no dense checkpoint, or options that do not fit it.
    """
    configs, made = _set_options(saved, given), {}
    for layer, config in configs.items():
        tensors = moe_tensors(saved.dense_ffn(layer), config, layer.moe, how)
        made[layer] = {f"fc1.{name}": tensor for name, tensor in tensors.items()}
    saved.restart(replaced(saved, made))
    return configs


def _set_options(saved: SavedModel, given: Mapping[str, Any]) -> dict[Layer, MoEConfig]:
    """Set the names and options of a MoE model; return its MoE layers with their configurations."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY

    from fairseq_tutel.plugin.install import refuse_options
    from fairseq_tutel.plugin.registration.flags import (
        EncoderDecoderOptions,
        ModelOptions,
        defaults,
        expert_counts,
    )

    layers, options = saved.layers, saved.options
    if any(layer.has_experts for layer in layers):
        raise ValueError("--input has experts already; give the checkpoint of a dense model.")
    arch = use_moe_variants(saved)
    known = defaults(EncoderDecoderOptions if _has_two_sides(layers) else ModelOptions)
    dataclass = MODEL_DATACLASS_REGISTRY.get(arch)
    if arch.startswith(SWIN) and dataclass is not None:  # its experts have their own defaults
        own = defaults(dataclass)
        known = {key: own[key] for key in (*known, *SWIN_KEYS)}
    for key in sorted(set(given) - set(known)):
        has = "no stages; leave it out" if key in SWIN_KEYS else "one side; give --moe-freq instead"
        raise ValueError(f"{flag_of(key)} is given, but {arch} has {has}.")
    options.update({key: getattr(v, "value", v) for key, v in known.items()} | dict(given))
    args = argparse.Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)  # defaults of the architecture, for older files
    refuse_options(args)
    refuse_bad_values(read(SwinExpertsConfig, args))
    chosen = _chosen(args, layers)
    if args.moe_pregate:
        refuse_too_far(args.moe_pregate, Counter(layer.side for layer in chosen))
    counts = expert_counts(args.moe_expert_count, len(chosen))
    return {
        layer: _config_of(args, saved.dense_ffn(layer), count)
        for layer, count in zip(chosen, counts, strict=True)
    }


def _has_two_sides(layers: list[Layer]) -> bool:
    return {layer.side for layer in layers} == set(SIDES)


def _chosen(args: argparse.Namespace, layers: list[Layer]) -> list[Layer]:
    """Return the layers that become MoE layers."""
    found: list[Layer] = []
    sides = list(dict.fromkeys(layer.side for layer in layers))
    last = getattr(args, "swin_expert_stages", len(sides))
    for side in sides[max(0, len(sides) - last) :]:
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
    from fairseq_tutel.plugin.registration.flags import layer_config

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
