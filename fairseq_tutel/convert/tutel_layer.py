"""Converts the weights of Tutel's MoE layer to fairseq_tutel's names and shapes.

E is the number of experts, and N the number of ranks. If N <= E, each rank holds the tensors [E / N, …] of
its experts. If N > E, each expert is split along dimension 1 over s = N / E ranks, and each rank holds
tensors [1, …]. If s does not divide dimension 1, Tutel pads this dimension.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fairseq_tutel.convert.configs import Tensors

COUNT = "_num_global_experts"
# For each Tutel tensor name, fairseq_tutel's name, and whether the last two dimensions are transposed.
Table = dict[str, tuple[str, bool]]

GATES: Table = {
    "wg.weight": ("weight", False),
    "temperature": ("log_scale", False),
    "cosine_projector.weight": ("projection_weight", False),
    "cosine_projector.bias": ("projection_bias", False),
    "sim_matrix": ("directions", True),
}
FFN: Table = {
    "batched_fc1_w": ("fc1_weight", False),
    "batched_fc2_w": ("fc2_weight", True),
    "batched_fc1_bias": ("fc1_bias", False),
    "batched_fc2_bias": ("fc2_bias", False),
}
LLAMA: Table = {  # Each rank holds flattened tensors of llama_ffn.
    "W_fc1": ("fc1_weight", True),
    "W_fc2": ("fc3_weight", True),
    "W_fc3": ("fc2_weight", True),
}


def our_layer(ranks: Sequence[Tensors], prefix: str, num_experts: int) -> Tensors:
    """Join a Tutel MoE layer's weights from all ranks, and convert them to fairseq_tutel's format.

    `prefix` is the beginning of the names of the layer's weights.

    Raises:
        ValueError: the ranks do not hold all experts. Callers add the layer's name to the message.
    """
    if num_experts < 1 or (num_experts % len(ranks) and len(ranks) % num_experts):
        raise ValueError(f"has {num_experts} experts, which {len(ranks)} ranks cannot hold")
    own = {name.removeprefix(prefix): t for name, t in ranks[0].items() if name.startswith(prefix)}
    gates = our_gates(own)
    widths = [gates[key].shape[1] for key in ("gate.weight", "gate.projection_weight") if key in gates]
    experts = [name for name in own if name.startswith("experts.")]
    if not experts:
        raise ValueError("lacks its experts")
    parts = {name.removeprefix("experts."): [rank[prefix + name] for rank in ranks] for name in experts}
    whole = _our_experts(parts, num_experts, widths[0] if widths else None)
    return {**gates, **{f"experts.{key}": tensor for key, tensor in whole.items()}}


def our_gates(theirs: Tensors) -> Tensors:
    """Convert a Tutel layer's gate weights to fairseq_tutel's format; keep weights of custom gates."""
    ours: Tensors = {}
    for name, tensor in theirs.items():
        if found := re.fullmatch(r"gates?\.(?:(\d+)\.)?(.+)", name):
            key, is_turned = GATES.get(found[2], (found[2], False))
            tensor = tensor.reshape(()) if found[2] == "temperature" else _turned(tensor, is_turned)
            index = int(found[1] or 0)
            ours[f"other_gates.{index - 1}.{key}" if index else f"gate.{key}"] = tensor
    return ours


def _turned(tensor: Tensor, is_turned: bool) -> Tensor:
    return tensor.transpose(-1, -2).contiguous() if is_turned else tensor


def _our_experts(parts: Mapping[str, Sequence[Tensor]], experts: int, model_dim: int | None) -> Tensors:
    """Join a Tutel layer's expert tensors from all ranks, and convert them to fairseq_tutel's format.

    `model_dim` comes from the gate's weights, because the flat tensors of llama_ffn do not show it.
    """
    if "W_fc1" in parts:
        return {ours: _our_llama(parts, name, experts, model_dim) for name, (ours, _) in LLAMA.items()}
    if not FFN.keys() & parts.keys():
        if any(len(own) > experts for own in parts.values()):
            raise ValueError("has custom experts that are split over ranks in an unknown way")
        return {name.replace(".", "__"): _joined(name, own, experts) for name, own in parts.items()}
    for name in ("batched_fc1_w", "batched_fc2_w"):
        if name not in parts:
            raise ValueError(f"lacks experts.{name}")
    if unknown := parts.keys() - FFN.keys():
        raise ValueError(f"has experts.{min(unknown)}, which ffn experts do not have")
    whole = {name: _joined(name, own, experts) for name, own in parts.items()}
    hidden_dim, out_dim = whole["batched_fc1_w"].shape[1], whole["batched_fc2_w"].shape[2]
    if "batched_fc2_bias" in whole:  # Tutel may pad this bias.
        whole["batched_fc2_bias"] = whole["batched_fc2_bias"][:, :out_dim].contiguous()
    expected = {
        "batched_fc2_w": (experts, hidden_dim, out_dim),
        "batched_fc1_bias": (experts, hidden_dim),
        "batched_fc2_bias": (experts, out_dim),
    }
    for name, shape in expected.items():
        if name in whole and whole[name].shape != shape:
            raise ValueError(
                f"has experts.{name} of shape {tuple(whole[name].shape)} on all ranks together, not {shape}"
            )
    return {FFN[name][0]: _turned(tensor, FFN[name][1]) for name, tensor in whole.items()}


def _joined(name: str, parts: Sequence[Tensor], experts: int) -> Tensor:
    """Join a tensor's parts from all ranks, in rank order, to a tensor [E, …] of all experts."""
    shapes, share = {tuple(part.shape) for part in parts}, max(1, len(parts) // experts)
    if len(shapes) > 1:
        raise ValueError(f"has experts.{name} of the shapes {sorted(shapes)} on different ranks")
    (shape,) = shapes
    if share > 1 and len(shape) == (2 if name.endswith("_w") else 1):
        # Tutel's scatter cuts an expert's memory into pieces, and divides the last dimension by `share`.
        own = (*shape[:-1], shape[-1] * share)
    elif shape[:1] != (max(1, experts // len(parts)),) or (share > 1 and len(shape) < 2):
        raise ValueError(
            f"has experts.{name} of shape {shape} on each of {len(parts)} ranks, which does not match "
            f"{experts} experts"
        )
    else:
        own = shape[1:] if share == 1 else (shape[1] * share, *shape[2:])
    return torch.cat([part.flatten() for part in parts]).view(experts, *own)


def _our_llama(
    parts: Mapping[str, Sequence[Tensor]], name: str, experts: int, model_dim: int | None
) -> Tensor:
    """Join a tensor of Tutel's llama_ffn from the flat, possibly padded, tensors of all ranks."""
    if model_dim is None:
        raise ValueError("has llama_ffn experts and a custom gate, so its model dimension is unknown")
    if name not in parts:
        raise ValueError(f"lacks experts.{name}")
    own = parts[name]
    sizes, numbers = {tuple(part.shape) for part in own}, own[0].numel() * len(own) // experts
    hidden_dim, left = divmod(numbers, model_dim)
    share = max(1, len(own) // experts)
    if len(sizes) > 1 or own[0].dim() != 1 or left >= share or hidden_dim == 0:
        raise ValueError(
            f"has experts.{name} of the shapes {sorted(sizes)} on {len(own)} ranks, which does not match "
            f"{experts} experts with the model dimension {model_dim}"
        )
    flat = torch.cat(list(own)).view(experts, numbers)[:, : hidden_dim * model_dim]
    shape = (hidden_dim, model_dim) if name == "W_fc3" else (model_dim, hidden_dim)
    return _turned(flat.reshape(experts, *shape), True)
