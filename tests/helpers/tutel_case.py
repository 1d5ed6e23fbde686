"""Makes a small `ft.moe_layer`, an equal layer written as loops, and custom gates and experts."""

import copy
import functools

import oracle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import same_function
from torch import Tensor, nn

import fairseq_tutel as ft

D, H, E, T = 6, 8, 4, 11
TOP = {"type": "top", "k": 2, "capacity_factor": 0.0}
FFN = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H}


def build(gate=None, experts=None, **options):
    gate = TOP if gate is None else gate
    experts = FFN if experts is None else experts
    given = copy.deepcopy((gate, experts))
    options.setdefault("seeds", (1, 2))
    layer = ft.moe_layer(gate_type=gate, model_dim=D, experts=experts, **options).double()
    layer(tokens(T))
    assert (gate, experts) == given, "the dicts were changed"
    return layer


def tokens(*shape: int, features: int = D, seed: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, features, generator=generator, dtype=torch.float64)
    return values.requires_grad_()


def linear_expert(layer, e: int, x_D: Tensor, activation=F.relu) -> Tensor:
    own = dict(layer.experts.named_parameters())
    nothing = torch.zeros(E, 1, dtype=x_D.dtype)
    hidden = activation(own["fc1_weight"][e] @ x_D + own.get("fc1_bias", nothing)[e])
    return own["fc2_weight"][e] @ hidden + own.get("fc2_bias", nothing)[e]


def loop(layer, x_TD, top_k, factor=0.0, *, expert=linear_expert, gate=None, **how) -> Tensor:
    """Compute the layer's output one token at a time, as Tutel's README describes the layer."""
    gate = gate or (lambda x: x @ layer.gates[0].weight.t())
    probs_TE = torch.softmax(gate(x_TD), dim=1)
    best = probs_TE.amax(dim=1).tolist()
    order = sorted(range(len(x_TD)), key=lambda t: -best[t]) if how.get("bpr") else None
    plan = oracle.plan(probs_TE.tolist(), top_k, factor, None, order)
    y = []
    for t, x_D in enumerate(x_TD):
        weights = probs_TE[t][plan.expert_ids[t]]
        if top_k > 1 and how.get("normalize", True):
            weights = weights / weights.sum()
        total = 0 * expert(layer, 0, x_D)
        for w, e, kept in zip(weights, plan.expert_ids[t], plan.kept[t], strict=True):
            if kept and how.get("prescore"):
                total = total + expert(layer, e, w * x_D)
            elif kept:
                total = total + w * expert(layer, e, x_D)
        y.append(total)
    return torch.stack(y)


def equals_loop(layer, top_k, factor=0.0, call=None, **how) -> None:
    x = tokens(T)
    named = {"x": x, **dict(layer.named_parameters())}
    same_function(lambda: layer(x, **(call or {})), lambda: loop(layer, x, top_k, factor, **how), named)


class OwnGate(nn.Module):
    def __init__(self, model_dim, num_global_experts, scale=1.0, top_k=None, **rest):
        super().__init__()
        self.scale, self.rest = scale, rest
        self.map = nn.Linear(model_dim, num_global_experts)
        if top_k is not None:
            self.top_k = top_k

    def reset_parameters(self):
        raise AssertionError("drawn by the constructor")

    def forward(self, x):
        return self.scale * self.map(x)


class OwnExperts(nn.Module):
    """These experts multiply rows by a stack of matrices, as in Tutel's example, and count their calls."""

    def __init__(self, model_dim, num_experts_per_device, sharded_count, out=None, power=1):
        super().__init__()
        assert sharded_count == 1
        self.power, self.seen = power, []
        self.W = nn.Parameter(torch.randn(num_experts_per_device, model_dim, out or model_dim))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, ctx):
        self.seen.append((tuple(x.shape), ctx))
        self.calls += 1
        return (x.flatten(2) @ self.W).unflatten(2, (*x.shape[2:-1], -1)) ** self.power


@functools.cache  # Several tests use these process groups.
def alone() -> dist.ProcessGroup:
    """Return a process group that contains only this rank."""
    return [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]


def custom(**rest) -> dict:
    return {"type": "custom", "module": OwnExperts, "num_experts_per_device": E, **rest}
