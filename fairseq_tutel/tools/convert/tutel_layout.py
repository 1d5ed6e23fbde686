"""How Tutel lays out a MoE layer, and how ours is: gates, experts, and the parts of them that ranks hold.

E experts (e local ones), N ranks, s = N / E ranks of an expert where there are more ranks; D model_dim,
H hidden_dim, O output dimension. A rank's part is [e, …], or [1, …] with 1/s of dimension 1, padded.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

# Tutel's name of a gate's tensor, our name, and whether its two dimensions change places.
GATES = (
    ("wg.weight", "weight", False),
    ("temperature", "log_scale", False),
    ("cosine_projector.weight", "projection_weight", False),
    ("cosine_projector.bias", "projection_bias", False),
    ("sim_matrix", "directions", True),
)
# Tutel's name of the experts' tensor, our name, and whether dimensions 1 and 2 change places.
FFN = (
    ("batched_fc1_w", "fc1_weight", False),
    ("batched_fc2_w", "fc2_weight", True),
    ("batched_fc1_bias", "fc1_bias", False),
    ("batched_fc2_bias", "fc2_bias", False),
)
LLAMA = (
    ("W_fc1", "fc1_weight", True),
    ("W_fc2", "fc3_weight", True),
    ("W_fc3", "fc2_weight", True),
)


def our_gate(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return our name and form of a gate's tensor; a custom gate's stays as it is."""
    for theirs, ours, turned in GATES:
        if name == theirs:
            tensor = tensor.t().contiguous() if turned else tensor
            return ours, tensor.reshape(()) if ours == "log_scale" else tensor
    return name, tensor


def tutel_gate(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return Tutel's name and form of a gate's tensor; a custom gate's stays as it is."""
    for theirs, ours, turned in GATES:
        if name == ours:
            tensor = tensor.t().contiguous() if turned else tensor
            return theirs, tensor.reshape(1) if ours == "log_scale" else tensor
    return name, tensor


def our_experts(
    parts: Mapping[str, Sequence[Tensor]], num_experts: int, model_dim: Callable[[], int]
) -> Tensors:
    """Return our tensors of all experts from the ranks' parts of Tutel's.

    Args:
        parts: by Tutel's name, one tensor of each rank.
        num_experts: E.
        model_dim: returns D, which Tutel's llama_ffn does not tell.

    Raises:
        ValueError: parts do not make E experts; the text goes on from the name of the layer.
    """
    if "W_fc1" in parts:
        return _our_llama(parts, num_experts, model_dim())
    known = {theirs: (ours, turned) for theirs, ours, turned in FFN}
    if not known.keys() & parts.keys():
        if any(len(own) > num_experts for own in parts.values()):
            raise ValueError(
                "has experts of a custom class in slices, and how those are cut is not known"
            )
        return {
            name.replace(".", "__"): _joined(name, own, num_experts) for name, own in parts.items()
        }
    for name in ("batched_fc1_w", "batched_fc2_w"):
        if name not in parts:
            raise ValueError(f"lacks experts.{name}")
    if parts.keys() - known.keys():
        raise ValueError(
            f"has experts.{min(parts.keys() - known.keys())}, which ffn experts have not"
        )
    whole = {name: _joined(name, own, num_experts) for name, own in parts.items()}
    out_dim = whole["batched_fc2_w"].shape[2]
    if "batched_fc2_bias" in whole:  # in s parts it is padded to whole ones
        whole["batched_fc2_bias"] = whole["batched_fc2_bias"][:, :out_dim].contiguous()
    hidden_dim = whole["batched_fc1_w"].shape[1]
    expected = {
        "batched_fc2_w": (num_experts, hidden_dim, out_dim),
        "batched_fc1_bias": (num_experts, hidden_dim),
        "batched_fc2_bias": (num_experts, out_dim),
    }
    for name, shape in expected.items():
        if name in whole and whole[name].shape != shape:
            raise ValueError(
                f"has experts.{name} of shape {tuple(whole[name].shape)} together, not {shape}"
            )
    return {
        known[name][0]: _turned(tensor) if known[name][1] else tensor
        for name, tensor in whole.items()
    }


def _turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous()


def _joined(name: str, parts: Sequence[Tensor], num_experts: int) -> Tensor:
    """Return [E, …] from the ranks' parts, of whole experts or of slices of one."""
    shapes, ranks = {tuple(part.shape) for part in parts}, len(parts)
    if len(shapes) > 1:
        raise ValueError(f"has experts.{name} of the shapes {sorted(shapes)} on different ranks")
    (shape,) = shapes
    share = max(1, ranks // num_experts)
    if share > 1 and len(shape) == (2 if name.endswith("_w") else 1):
        # Of Tutel's scatter: equal pieces of an expert's memory, by another shape of as many numbers.
        whole = (*shape[:-1], shape[-1] * share)
        flat = [
            torch.cat([p.flatten() for p in parts[i : i + share]]) for i in range(0, ranks, share)
        ]
        return torch.stack([expert.view(whole) for expert in flat])
    if shape[:1] != (max(1, num_experts // ranks),) or (share > 1 and len(shape) < 2):
        raise ValueError(
            f"has experts.{name} of shape {shape} on each of {ranks} ranks, which are not {num_experts} "
            "experts"
        )
    if share == 1:
        return torch.cat(list(parts))
    slices = [torch.cat(list(parts[i : i + share]), dim=1) for i in range(0, ranks, share)]
    return torch.cat(slices)


def _our_llama(parts: Mapping[str, Sequence[Tensor]], num_experts: int, model_dim: int) -> Tensors:
    """Return the tensors of llama_ffn, which a rank holds flat; padded where ranks share an expert."""
    whole = {}
    for theirs, ours, _ in LLAMA:
        if theirs not in parts:
            raise ValueError(f"lacks experts.{theirs}")
        own = parts[theirs]
        sizes = {tuple(part.shape) for part in own}
        share = max(1, len(own) // num_experts)
        per_expert = own[0].numel() * len(own) // num_experts
        hidden_dim = per_expert // model_dim
        left = per_expert - hidden_dim * model_dim
        if len(sizes) > 1 or own[0].dim() != 1 or left >= share or hidden_dim == 0:
            raise ValueError(
                f"has experts.{theirs} of the shapes {sorted(sizes)} on {len(own)} ranks, which are not "
                f"{num_experts} experts for tokens of {model_dim}"
            )
        flat = torch.cat(list(own)).view(num_experts, per_expert)[:, : hidden_dim * model_dim]
        shape = (hidden_dim, model_dim) if theirs == "W_fc3" else (model_dim, hidden_dim)
        whole[ours] = _turned(flat.reshape(num_experts, *shape))
    return whole


def tutel_experts(tensors: Tensors, ranks: int, rank: int) -> Tensors:
    """Return a rank's part of Tutel's experts from all of ours.

    Args:
        tensors: ours by name, [E, …].
        ranks: N, a divisor or a multiple of E.
        rank: whose part.

    Raises:
        ValueError: ours have no such form in Tutel; the text goes on from the name of the layer.
    """
    table = LLAMA if "fc3_weight" in tensors else FFN
    known = {ours: (theirs, turned) for theirs, ours, turned in table}
    if not known.keys() & tensors.keys():
        known = {name: (name.replace("__", "."), False) for name in tensors}
    if tensors.keys() - known.keys():
        raise ValueError(
            f"has experts.{min(tensors.keys() - known.keys())}, which Tutel's have not"
        )
    num_experts = next(iter(tensors.values())).shape[0]
    share = max(1, ranks // num_experts)
    local = max(1, num_experts // ranks)
    first, piece = rank // share * local, rank % share
    part = {}
    for ours, tensor in tensors.items():
        theirs, turned = known[ours]
        own = tensor[first : first + local]
        own = own.transpose(1, 2) if turned else own
        if table is LLAMA:
            part[theirs] = _piece(own.reshape(1, -1), share, piece).reshape(-1)
        elif share == 1:
            part[theirs] = own.clone(memory_format=torch.contiguous_format)
        elif ours.startswith(("fc1", "fc2")) and (ours == "fc2_bias" or own.shape[1] % share == 0):
            part[theirs] = _piece(own, share, piece)
        else:
            raise ValueError(
                f"has experts.{ours} of shape {tuple(tensor.shape)}, which cannot be cut for {share} ranks "
                "of an expert"
            )
    return part


def _piece(tensor: Tensor, count: int, index: int) -> Tensor:
    """Return one of `count` equal pieces of dimension 1, padded with zeros; a copy."""
    width = -(-tensor.shape[1] // count)
    own = tensor[:, index * width : (index + 1) * width]
    padding = own.new_zeros(own.shape[0], width - own.shape[1], *own.shape[2:])
    return torch.cat([own, padding], dim=1)
