"""Makes a MoE checkpoint of a dense one: experts are copies of an FFN, and gates are initialized.

Source: Komatsuzaki et al. 2022 (Sparse Upcycling). E experts, D model_dim, H the FFN's hidden dimension,
h = H / G an expert's. With G > 1 an expert is a G-th of the FFN. Experts g * G to g * G + G - 1 have the
same gate row, so that a token chooses all G parts together (He et al. 2024, virtual groups). Their fc2 is G
times larger, since each gets a G-th of the token's weight.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import LAYER_NORM, Layer, SavedModel
from fairseq_tutel.convert.configs import SWIN, Tensors, replaced, use_moe_variants
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.moe.capacity import capacity_of
from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of
from fairseq_tutel.moe.experts import Experts
from fairseq_tutel.moe.gates import CosineGate, LinearGate
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.options.option import (
    NOT_NEGATIVE,
    POSITIVE,
    flag_of,
    option,
    options_in,
    read,
    refuse_bad_values,
)
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.plugin.install import chosen_layers
from fairseq_tutel.ranks.groups import Part
from fairseq_tutel.vision.options import SwinExpertsConfig

SWIN_KEYS = [item.key for item in options_in(SwinExpertsConfig)]
tool = partial(option, of="tool")


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How the copies of an FFN differ; options of `convert upcycle`."""

    seed: int = tool(1, "seed of gates and of all random changes")
    perturb: float = tool(
        0.0,
        "standard deviation of Gaussian noise on the experts' weights, relative to that of the matrix",
        rule=NOT_NEGATIVE,
    )
    reinitialize: float = tool(
        0.0,
        "fraction of each expert's hidden units to initialize again with the statistics of the old ones "
        "(Drop-Upcycling, Nakamura et al. 2025, with 0.5)",
        rule=(lambda v: 0 <= v <= 1, "give a number from 0 to 1"),
    )
    gate_scale: float = tool(
        1.0,
        "factor for the gates' initial weights; smaller values give more even probabilities",
        rule=POSITIVE,
    )


def upcycle(saved: SavedModel, given: Mapping[str, Any], how: Variation) -> dict[Layer, MoEConfig]:
    """Replace FFNs by experts, in place; return the MoE layers with their configurations.

    Args:
        saved: a dense checkpoint.
        given: options of the experts, by their keys; others have their defaults.
        how: how the copies differ.

    Raises:
        ValueError: it is not a dense checkpoint, or options that do not fit it.
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
        layer_config,
    )

    layers, options = saved.layers, saved.options
    if any(layer.has_experts for layer in layers):
        raise ValueError("--input has experts already; give the checkpoint of a dense model.")
    arch = use_moe_variants(saved)
    has_two_sides = {layer.side for layer in layers} == {*SIDES}
    known = defaults(EncoderDecoderOptions if has_two_sides else ModelOptions)
    if arch.startswith(SWIN):  # its experts have their own defaults
        own = defaults(MODEL_DATACLASS_REGISTRY[arch])
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
    configs = {}
    for layer, count in zip(chosen, expert_counts(args.moe_expert_count, len(chosen)), strict=True):
        ffn = saved.dense_ffn(layer)
        hidden_dim, model_dim = ffn["fc1.weight"].shape
        configs[layer] = layer_config(
            args,
            None,
            count,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            activation=str(getattr(args, "activation_fn", "relu")),
            hidden_layer_norm=LAYER_NORM[0] in ffn,
        )
    return configs


def _chosen(args: argparse.Namespace, layers: list[Layer]) -> list[Layer]:
    """Return the layers that become MoE layers."""
    found: list[Layer] = []
    sides = list(dict.fromkeys(layer.side for layer in layers))
    last = getattr(args, "swin_expert_stages", len(sides))
    for side in sides[max(0, len(sides) - last) :]:
        own = getattr(args, f"{side}_moe_freq", -1)
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


def _parts_of(config: MoEConfig, hidden_dim: int) -> int:
    """Return G, the number of experts that make up the FFN, or refuse the configuration."""
    if config.expert_type != "ffn":
        raise ValueError(
            f"{label_of('expert_type')} is {config.expert_type!r}, but a dense FFN can be copied only to "
            "experts of type ffn; leave it out."
        )
    parts, rest = divmod(hidden_dim, config.hidden_dim)
    if rest or parts < 1:
        raise ValueError(
            f"{label_of('hidden_dim')} is {config.hidden_dim}, but the dense FFN is {hidden_dim} wide; "
            "give a divisor of that, or 0."
        )
    # Options with which a token would not choose all parts of an FFN together.
    apart = {
        "num_experts": config.num_experts % parts > 0,
        "top_k": config.top_k % parts > 0,
        "expert_groups": config.num_experts // config.expert_groups % parts > 0,
        "gate_type": not set(config.gate_types) <= set(GATE_TYPES) - {"hash"},
        "residual": config.residual,
        "choice": config.choice == "experts",
        "hidden_layer_norm": config.hidden_layer_norm,  # --scale-fc normalizes the FFN as a whole
    }
    for name in (name for name, is_apart in apart.items() if is_apart and parts > 1):
        raise ValueError(
            f"{label_of('hidden_dim')} {config.hidden_dim} splits the dense FFN of {hidden_dim} into "
            f"{parts} parts, which {label_of(name)} {getattr(config, name)} would not keep together; leave "
            f"one of the two out, or choose multiples of {parts}."
        )
    return parts


def moe_tensors(ffn: Mapping[str, Tensor], config: MoEConfig, name: str, how: Variation) -> Tensors:
    """Return the state dict of a MoE layer made of a dense FFN.

    Args:
        ffn: tensors from `SavedModel.dense_ffn`.
        config: the layer's configuration.
        name: its qualified name, part of its seeds.
        how: how the copies differ.

    Raises:
        ValueError: experts that cannot be copies, or a gate that cannot be scaled.
    """
    parts = _parts_of(config, len(ffn["fc1.weight"]))
    with torch.device("meta"):
        experts = Experts(config, Part(config.num_experts))
    layer = MoELayer(config, seed=how.seed, name=name, experts=experts)
    _prepare_gates(layer, parts, how.gate_scale)
    made = _copies(ffn, config)
    made["experts.fc2_weight"] *= parts
    _reinitialize(made, name, how)
    _perturb(made, name, how)
    made |= _shared(ffn, layer)
    return {key: made.get(key, tensor) for key, tensor in layer.state_dict().items()}


def _copies(ffn: Mapping[str, Tensor], config: MoEConfig) -> Tensors:
    """Return the MoE layer's tensors that are copies of the FFN's, or of parts of them."""
    made: Tensors = {}
    for key, tensor in ffn.items():
        map_name, _, kind = key.replace("ffn_layernorm", "hidden_layer_norm").partition(".")
        if config.residual:
            made[f"beside.dense.{map_name}.{kind}"] = tensor.clone()
        if map_name == "hidden_layer_norm":
            made[f"experts.{map_name}.{kind}"] = tensor
            continue
        if map_name == "fc1":
            parts_G = tensor.unflatten(0, (-1, config.hidden_dim))
        elif kind == "weight":
            parts_G = tensor.unflatten(1, (-1, config.hidden_dim)).transpose(0, 1)
        else:
            parts_G = tensor.unsqueeze(0)
        repeats = (config.num_experts // len(parts_G), *(1 for _ in tensor.shape))
        made[f"experts.{map_name}_{kind}"] = parts_G.repeat(repeats)
    return made


def differences(config: MoEConfig, how: Variation) -> list[str]:
    """Return why the layer's initial output, in evaluation, differs from the FFN's; [] if it does not."""
    found = []
    scale, several = config.routed_scaling_factor, config.top_k > 1
    if config.choice == "experts":
        found.append("experts choose their tokens, and a token may have any number of them")
    elif not sums_to_1(config) and several:
        found.append("the weights of a token's experts do not sum to 1 (--moe-normalize-gate before)")
    elif not sums_to_1(config) and scale == 1:
        found.append(
            "the weight of a token's one expert is its probability, not 1 (--moe-top-k 2 gives weights "
            "of sum 1; --moe-routed-scaling-factor with the number of experts and --gate-scale 0.01 give "
            "one of nearly 1, by which the gate learns)"
        )
    elif not sums_to_1(config):
        found.append(f"the weight of a token's one expert is {scale:g} times its probability, not 1")
    elif scale != 1:
        found.append(f"all weights are multiplied by {scale:g} (--moe-routed-scaling-factor)")
    if config.prescore and several:
        found.append("weights multiply what experts read (--moe-prescore), before the activation")
    if capacity_of(config, training=False).is_limited:
        found.append("with a capacity in evaluation tokens may be dropped")
    if how.perturb:
        found.append(f"the experts' weights have noise (--perturb {how.perturb:g})")
    if how.reinitialize:
        found.append(f"hidden units are initialized again (--reinitialize {how.reinitialize:g})")
    return found


def sums_to_1(config: MoEConfig) -> bool:
    """Whether the weights of a token's experts sum to 1, before they are scaled."""
    if config.gate_types[config.gate_index] == "hash":
        return True
    if config.top_k > 1 and config.normalize_gate != "none":
        return True
    return config.score_function == "softmax" and config.top_k == config.num_experts


@torch.no_grad()
def _prepare_gates(layer: MoELayer, parts: int, scale: float) -> None:
    """Scale the gates' initial weights, and copy one row to all experts of a virtual group."""
    for gate in (layer.gate, *layer.other_gates):
        if scale != 1 and not isinstance(gate, LinearGate):
            raise ValueError(
                f"--gate-scale is {scale:g}, which has no effect on {label_of('gate_type')} "
                f"{layer.config.gate_type}; leave it out, or choose linear."
            )
        if isinstance(gate, LinearGate):
            gate.weight.mul_(scale)
        if isinstance(gate, (LinearGate, CosineGate)):
            rows_ED = gate.weight if isinstance(gate, LinearGate) else gate.directions
            rows_ED.copy_(rows_ED[::parts].repeat_interleave(parts, dim=0))


def _reinitialize(made: Tensors, name: str, how: Variation) -> None:
    """Initialize a fraction of every expert's hidden units again, normal with the old mean and deviation.

    Source: Nakamura et al. 2025 (Drop-Upcycling), section 3; biases are treated alike.
    """
    w1_EHD, b1_EH, w2_EDH = (made[f"experts.{k}"] for k in ("fc1_weight", "fc1_bias", "fc2_weight"))
    E, H, _ = w1_EHD.shape
    for e in range(E if how.reinitialize else 0):
        generator = seeded_generator(how.seed, name, e, "reinitialize")
        units = torch.randperm(H, generator=generator)[: round(how.reinitialize * H)]
        for stack, dim in ((w1_EHD, 0), (b1_EH, 0), (w2_EDH, 1)):
            old = stack[e].index_select(dim, units).float()
            if not old.numel():
                continue
            spread, mean = torch.std_mean(old, correction=0)
            drawn = torch.randn(old.shape, generator=generator) * spread + mean
            stack[e].index_copy_(dim, units, drawn.to(stack.dtype))


def _perturb(made: Tensors, name: str, how: Variation) -> None:
    """Add noise to every expert's matrices; source: Komatsuzaki et al. 2022 (Sparse Upcycling)."""
    for key in ("experts.fc1_weight", "experts.fc2_weight") if how.perturb else ():
        stack = made[key]
        for e, expert in enumerate(stack.unbind(0)):
            generator = seeded_generator(how.seed, name, e, f"perturb.{key}")
            noise = torch.randn(expert.shape, generator=generator)
            expert += (noise * (how.perturb * expert.float().std())).to(stack.dtype)


def _shared(ffn: Mapping[str, Tensor], layer: MoELayer) -> Tensors:
    """Return shared experts with an initial output of 0: fc1 is a copy, and fc2 is 0."""
    if not layer.config.shared_experts:
        return {}
    width = layer.config.shared_experts * layer.config.hidden_dim
    units = torch.arange(width) % len(ffn["fc1.weight"])
    model_dim = layer.config.model_dim
    return {
        "beside.shared.fc1.weight": ffn["fc1.weight"][units],
        "beside.shared.fc1.bias": ffn["fc1.bias"][units],
        "beside.shared.fc2.weight": ffn["fc2.weight"].new_zeros(model_dim, width),
        "beside.shared.fc2.bias": ffn["fc2.bias"].new_zeros(model_dim),
    }
