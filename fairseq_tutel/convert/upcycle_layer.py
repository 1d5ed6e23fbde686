"""Makes the tensors of a MoE layer from a dense FFN, and describes how its outputs differ.

E experts, D model_dim, H the FFN's hidden dimension, h = H / G an expert's. With G > 1 an expert is a G-th
of the FFN. Experts g * G to g * G + G - 1 have the same gate row, so that a token chooses all G parts
together (He et al. 2024, virtual groups). Their fc2 is G times larger, since each gets a G-th of the
token's weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of
from fairseq_tutel.moe.experts import Experts
from fairseq_tutel.moe.gates import CosineGate, LinearGate
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.ranks.groups import Part

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How the copies of an FFN differ.

    Attributes:
        seed: seed of gates and of all differences.
        perturb: standard deviation of Gaussian noise on weights, relative to that of the matrix.
        reinitialize: fraction of every expert's hidden units that are initialized again, 0 to 1.
        gate_scale: factor for the initial weights of a linear gate.
    """

    seed: int = 1
    perturb: float = 0.0
    reinitialize: float = 0.0
    gate_scale: float = 1.0


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
    if parts > 1:
        _refuse_parts(config, parts, hidden_dim)
    return parts


def _refuse_parts(config: MoEConfig, parts: int, hidden_dim: int) -> None:
    """Refuse options with which a token would not choose all parts of an FFN together."""
    label = f"{label_of('hidden_dim')} {config.hidden_dim}"
    cut = f"{label} splits the dense FFN of {hidden_dim} into {parts} parts"
    for name, value in (
        ("num_experts", config.num_experts),
        ("top_k", config.top_k),
        ("expert_groups", config.num_experts // config.expert_groups),
    ):
        if value % parts:
            what = "leaves groups of" if name == "expert_groups" else "is"
            raise ValueError(
                f"{cut}, but {label_of(name)} {what} {value}; give a multiple of {parts}, or experts as "
                "wide as the FFN (--moe-expert-ffn-dim 0)."
            )
    wrong = {
        "gate_type": not set(config.gate_types) <= set(GATE_TYPES) - {"hash"},
        "residual": config.residual,
        "choice": config.choice == "experts",
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ValueError(
            f"{cut}, which {label_of(name)} {getattr(config, name)} would not keep together; leave one of "
            "the two out."
        )
    if config.hidden_layer_norm:
        raise ValueError(
            f"{cut}, but --scale-fc normalizes the FFN as a whole; leave --moe-expert-ffn-dim out."
        )


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
    layer = _without_experts(config, how.seed, name)
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


def _without_experts(config: MoEConfig, seed: int, name: str) -> MoELayer:
    """Return an initialized layer whose experts are meta tensors."""
    with torch.device("meta"):
        experts = Experts(config, Part(config.num_experts))
    return MoELayer(config, seed=seed, name=name, experts=experts)


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
    if not layer.config.shared_experts or layer.beside is None:
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
