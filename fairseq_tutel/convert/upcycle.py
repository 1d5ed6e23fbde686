"""Makes a MoE checkpoint from a dense checkpoint: experts are copies of an FFN, and gates are new.

The method is that of Komatsuzaki et al. 2022 (Sparse Upcycling). E is the number of experts, D the
model_dim, and H the hidden dimension of the dense FFN. With G parts per FFN, an expert's hidden dimension
is h = H / G. If G > 1, each expert is one of G parts of the dense FFN. For every g, the G experts g * G to
g * G + G - 1 together are the dense FFN. Their gate rows are equal, so a token chooses all G experts (He et
al. 2024, virtual groups). The fc2 of these experts is multiplied by G, because each expert gets only 1/G of
the token's weight.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import LAYER_NORM, Layer, SavedModel
from fairseq_tutel.convert.command import OF_EXPERTS, Variation
from fairseq_tutel.convert.configs import SWIN, Tensors, counts_text, replaced, use_moe_variants
from fairseq_tutel.convert.more_experts import add_experts
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of
from fairseq_tutel.moe.experts import Experts
from fairseq_tutel.moe.gates import CosineGate, LinearGate
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.option import flag_of, options_in, read, refuse_bad_values
from fairseq_tutel.parallel.groups import Part
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.plugin.install import chosen_layers
from fairseq_tutel.vision.options import SwinExpertsConfig

SWIN_KEYS = [item.key for item in options_in(SwinExpertsConfig)]


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert upcycle`."""
    how = read(Variation, arguments)
    refuse_bad_values(how)
    # An option that was not given is None or, for a switch, False. The number 0 counts as given.
    given = {item.key: getattr(arguments, item.key) for item in OF_EXPERTS}
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    saved = SavedModel.open(inputs[0])
    if any(layer.has_experts for layer in saved.layers):
        summary = add_experts(saved, given, how)
        saved.write(output)
        return summary
    configs = upcycle(saved, given, how)
    counts = counts_text([config.num_experts for config in configs.values()])
    first, labels = next(iter(configs.values())), ", ".join(layer.label for layer in configs)
    reasons = dict.fromkeys(r for config in configs.values() for r in differences(config, how))
    what = (
        f"differ from the dense model's outputs: {'; '.join(reasons)}"
        if reasons
        else "equal the dense model's outputs up to rounding"
    )
    saved.write(output)
    return (
        f": {saved.name('model')}, {counts} experts of {first.hidden_dim}, top-{first.top_k}, in {labels}\n"
        f"its initial outputs {what}"
    )


def upcycle(saved: SavedModel, given: Mapping[str, Any], how: Variation) -> dict[Layer, MoEConfig]:
    """Replace FFNs of a dense checkpoint by experts, in place, and return the MoE configurations.

    Args:
        saved: a dense checkpoint.
        given: options of the experts, by key; other options have defaults.
        how: options that change the copies of an FFN.

    Raises:
        ValueError: the options do not fit the checkpoint.
    """
    configs, made = _set_options(saved, given), {}
    for layer, config in configs.items():
        tensors = moe_tensors(saved.dense_ffn(layer), config, layer.moe, how)
        made[layer] = {f"fc1.{name}": tensor for name, tensor in tensors.items()}
    saved.restart(replaced(saved, made))
    return configs


def _set_options(saved: SavedModel, given: Mapping[str, Any]) -> dict[Layer, MoEConfig]:
    """Change a dense checkpoint's options to those of a MoE model, and return the MoE configurations."""
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
    arch = use_moe_variants(saved)
    has_two_sides = {layer.side for layer in layers} == {*SIDES}
    known = defaults(EncoderDecoderOptions if has_two_sides else ModelOptions)
    if arch.startswith(SWIN):  # Swin's experts have different defaults.
        own = defaults(MODEL_DATACLASS_REGISTRY[arch])
        known = {key: own[key] for key in (*known, *SWIN_KEYS)}
    for key in sorted(set(given) - set(known)):
        has = (
            "no stages; remove the option"
            if key in SWIN_KEYS
            else "no separate encoder and decoder; give --moe-freq instead"
        )
        raise ValueError(f"{flag_of(key)} is given, but {arch} has {has}.")
    options.update({key: getattr(v, "value", v) for key, v in known.items()} | dict(given))
    args = argparse.Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)  # This call sets missing options to their defaults.
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
    """Return the dense layers that --moe-freq and similar options select to become MoE layers."""
    found: list[Layer] = []
    sides = list(dict.fromkeys(layer.side for layer in layers))
    last = getattr(args, "swin_expert_stages", len(sides))
    for side in sides[max(0, len(sides) - last) :]:
        own = getattr(args, f"{side}_moe_freq", -1)
        freq = args.moe_freq if own == -1 else own
        if freq < 0:
            raise ValueError(f"--moe-freq of the {side} is {freq}; give an integer of at least 0.")
        of_side = [layer for layer in layers if layer.side == side]
        found += [of_side[i] for i in chosen_layers(range(len(of_side)), freq)]
    if not found:
        raise ValueError(
            f"--moe-freq is {args.moe_freq}, so none of the {len(layers)} layers would get experts; give a "
            "number from 1 to the number of encoder or decoder layers."
        )
    return found


def _parts_of(config: MoEConfig, hidden_dim: int) -> int:
    """Return the number of experts that each FFN is split into; raise ValueError if it cannot be split."""
    if config.expert_type != "ffn":
        raise ValueError(
            f"{label_of('expert_type')} is {config.expert_type!r}, but a dense FFN can be copied only to "
            "experts of type ffn; remove the option."
        )
    parts, rest = divmod(hidden_dim, config.hidden_dim)
    if rest or parts < 1:
        raise ValueError(
            f"{label_of('hidden_dim')} is {config.hidden_dim}, but the dense FFN is {hidden_dim} wide; "
            f"give a divisor of {hidden_dim}, or 0."
        )
    # With these options, a token might choose only some of the parts of an FFN.
    apart = {
        "num_experts": config.num_experts % parts > 0,
        "top_k": config.top_k % parts > 0,
        "expert_groups": config.num_experts // config.expert_groups % parts > 0,
        "gate_type": not set(config.gate_types) <= set(GATE_TYPES),
        "residual": config.residual,
        "cmr": config.cmr,
        "choice": config.choice == "experts",
        "hidden_layer_norm": config.hidden_layer_norm,  # --scale-fc normalizes only a complete FFN.
    }
    for name in (name for name, is_apart in apart.items() if is_apart and parts > 1):
        raise ValueError(
            f"{label_of('hidden_dim')} {config.hidden_dim} splits the dense FFN of {hidden_dim} into "
            f"{parts} parts, but with {label_of(name)} {getattr(config, name)} a token might not choose "
            f"all parts; remove one of the two options, or choose multiples of {parts}."
        )
    return parts


def moe_tensors(ffn: Mapping[str, Tensor], config: MoEConfig, name: str, how: Variation) -> Tensors:
    """Return the state dict of a MoE layer whose experts are copies of a dense FFN.

    Args:
        ffn: tensors from `SavedModel.dense_ffn`.
        config: the layer's configuration.
        name: the layer's qualified name, which affects its random seeds.
        how: options that change the copies of the FFN.

    Raises:
        ValueError: the FFN cannot be copied to the experts, or the gate cannot be scaled.
    """
    parts = _parts_of(config, len(ffn["fc1.weight"]))
    with torch.device("meta"):
        experts = Experts(config, Part(config.num_experts))
    layer = MoELayer(config, seed=how.seed, name=name, experts=experts)
    _prepare_gates(layer, parts, how.gate_scale)
    made = _copies(ffn, config)
    made["experts.fc2_weight"] *= parts
    _reinitialize(made, name, how)
    made |= _shared(ffn, layer)
    return {key: made.get(key, tensor) for key, tensor in layer.state_dict().items()}


def _copies(ffn: Mapping[str, Tensor], config: MoEConfig) -> Tensors:
    """Return a MoE layer's tensors that are complete or partial copies of a dense FFN."""
    made: Tensors = {}
    for key, tensor in ffn.items():
        map_name, _, kind = key.replace("ffn_layernorm", "hidden_layer_norm").partition(".")
        if config.residual or config.cmr:
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
    """Return the reasons why a new MoE layer's evaluation outputs differ from the dense FFN's."""
    found = []
    scale, several = config.routed_scaling_factor, config.top_k > 1
    if config.choice == "experts":
        found.append("experts choose their tokens, so a token may have any number of experts")
    elif not sums_to_1(config) and several:
        found.append("the weights of a token's experts do not sum to 1 (--moe-normalize-gate before)")
    elif not sums_to_1(config) and scale == 1:
        found.append("the weight of a token's only expert is its probability, not 1 (try --moe-top-k 2)")
    elif not sums_to_1(config):
        found.append(f"the weight of a token's only expert is {scale:g} times its probability, not 1")
    elif scale != 1:
        found.append(f"all weights are multiplied by {scale:g} (--moe-routed-scaling-factor)")
    if config.eom or config.fom:
        found.append("outputs are multiplied by 1 minus the masking probability (--moe-eom, --moe-fom)")
    if config.prescore and several:
        found.append("weights multiply the experts' inputs instead of their outputs (--moe-prescore)")
    if capacity_of(config, training=False).is_limited:
        found.append("the capacity is limited in evaluation, so tokens may be dropped")
    if how.reinitialize:
        found.append(f"some hidden units are reinitialized (--reinitialize {how.reinitialize:g})")
    return found


def sums_to_1(config: MoEConfig) -> bool:
    """Return whether a token's gate weights sum to 1 before --moe-routed-scaling-factor is applied."""
    if config.top_k > 1 and config.normalize_gate != "none":
        return True
    return config.score_function == "softmax" and config.top_k == config.num_experts


@torch.no_grad()
def _prepare_gates(layer: MoELayer, parts: int, scale: float) -> None:
    """Scale the initial weights of a layer's gates, in place; all parts of an FFN get equal gate rows."""
    for gate in (layer.gate, *layer.other_gates):
        if scale != 1 and not isinstance(gate, LinearGate):
            raise ValueError(
                f"--gate-scale is {scale:g}, which has no effect on {label_of('gate_type')} "
                f"{layer.config.gate_type}; remove --gate-scale, or choose the gate type linear."
            )
        if isinstance(gate, LinearGate):
            gate.weight.mul_(scale)
        if isinstance(gate, (LinearGate, CosineGate)):
            rows_ED = gate.weight if isinstance(gate, LinearGate) else gate.directions
            rows_ED.copy_(rows_ED[::parts].repeat_interleave(parts, dim=0))


def _reinitialize(made: Tensors, name: str, how: Variation) -> None:
    """Reinitialize a fraction of every expert's hidden units, in place.

    New weights and biases are drawn from a normal distribution with the old mean and standard deviation.
    The method is in section 3 of Nakamura et al. 2025 (Drop-Upcycling).
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


def _shared(ffn: Mapping[str, Tensor], layer: MoELayer) -> Tensors:
    """Return the tensors of shared experts that initially output 0: fc1 is a copy, and fc2 is 0."""
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
