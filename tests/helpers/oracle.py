"""This reference MoE layer consists of simple, slow loops over tokens, choices and experts."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.moe.experts import Experts

ACTIVATIONS = {
    "relu": lambda x: x.clamp_min(0),
    "relu_squared": lambda x: x.clamp_min(0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_fast": lambda x: ACTIVATIONS["gelu_accurate"](x),
    "gelu_accurate": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": torch.tanh,
    "linear": lambda x: x,
    "swish": lambda x: x / (1 + torch.exp(-x)),
}


@dataclass
class Plan:
    """The result of `plan`: `slots[t][k]` is the slot of token t's choice k, or -1 for padding."""

    expert_ids: list[list[int]]
    slots: list[list[int]]
    kept: list[list[bool]]
    counts: list[int]
    assigned: list[list[int]]
    dropped: list[int]


def plan(
    scores: list[list[float]],
    top_k: int,
    factor: float = 0.0,
    real: list[bool] | None = None,
    order: list[int] | None = None,
) -> Plan:
    """Route tokens by loops; first choices get slots before second choices, in the given token order."""
    num_tokens, num_experts = len(scores), len(scores[0]) if scores else 1
    real = [True] * num_tokens if real is None else real
    order = list(range(num_tokens)) if order is None else order
    limit = top_k * math.ceil(abs(factor) * sum(real) / num_experts) if factor else math.inf
    ids = [sorted(range(num_experts), key=lambda e: (-row[e], e))[:top_k] for row in scores]
    slots = [[-1] * top_k for _ in scores]
    kept = [[False] * top_k for _ in scores]
    assigned = [[0] * num_experts for _ in range(top_k)]
    taken, counts, dropped = [0] * num_experts, [0] * num_experts, [0] * top_k
    for j in range(top_k):
        for t in order:
            if not real[t]:
                continue
            e = ids[t][j]
            slots[t][j] = taken[e]
            kept[t][j] = taken[e] < limit
            taken[e] += 1
            assigned[j][e] += 1
            counts[e] += kept[t][j]
            dropped[j] += not kept[t][j]
    return Plan(ids, slots, kept, counts, assigned, dropped)


def one_expert(experts: Experts, e: int, x_D: Tensor) -> Tensor:
    """Apply expert e to one token, without dropout."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = getattr(experts, f"{name}_bias")
        weight = getattr(experts, f"{name}_weight")
        return F.linear(x, weight[e], None if bias is None else bias[e])

    hidden_H = linear("fc1", x_D)
    if experts.config.expert_type == "glu":
        hidden_H = ACTIVATIONS["swish"](hidden_H) * linear("fc3", x_D)
    else:
        hidden_H = ACTIVATIONS[experts.config.activation](hidden_H)
    if experts.hidden_layer_norm is not None:
        hidden_H = experts.hidden_layer_norm(hidden_H)
    return linear("fc2", hidden_H)


def one_copy(layer: nn.Module, e: int, weight: Tensor, x_D: Tensor) -> Tensor:
    """Apply expert e to one token, with the gate weight on the output, or on the input with `prescore`."""
    if layer.config.prescore:
        return one_expert(layer.experts, e, weight * x_D)
    return weight * one_expert(layer.experts, e, x_D)


def mixture(
    layer: nn.Module,
    x_TD: Tensor,
    top_k: int,
    factor: float = 0.0,
    real: list[bool] | None = None,
    order: list[int] | None = None,
    seen_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the gshard loss of a MoELayer token by token, from the layer's parameters.

    The gate reads `seen_TD` instead of x if `seen_TD` is given.
    """
    probs_TE = torch.softmax((x_TD if seen_TD is None else seen_TD) @ layer.gate.weight.t(), dim=1)
    p = plan(probs_TE.tolist(), top_k, factor, real, order)
    y = []
    for t, x_D in enumerate(x_TD):
        chosen = probs_TE[t][p.expert_ids[t]]
        weights = chosen / chosen.sum() if top_k > 1 else chosen
        copies = zip(weights, p.expert_ids[t], p.kept[t], strict=True)
        y.append(sum((one_copy(layer, e, w, x_D) for w, e, k in copies if k), 0 * x_D))
    real_T = torch.tensor([True] * len(x_TD) if real is None else real)
    tokens = max(int(real_T.sum()), 1)
    share_E = torch.tensor(p.assigned[0], dtype=x_TD.dtype) / tokens
    mean_E = probs_TE[real_T].sum(dim=0) / tokens
    return torch.stack(y), len(share_E) * (share_E * mean_E).sum()
