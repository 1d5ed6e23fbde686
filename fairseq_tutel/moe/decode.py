"""The decode path is a shorter path through a MoE layer for few tokens on a CPU without gradients.

For few tokens, reading the weights takes most of the time. The layer's output needs only the experts and
gate weights of each token. Slots, counts and row maps are therefore computed only at their first access.
The decode path gives the same results as `routing.decide` and the fused FFN (`expert_ffn`). Shapes use T
for tokens, D for model_dim, E for experts, K for top_k and N for T * K assignments.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.choice import choose
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights
from fairseq_tutel.moe.routing import GateOutput, Routing, placed, scaled
from fairseq_tutel.moe.slots import MicroBatch

# The decode path is faster than the normal path up to this number of assignments.
MOST_ASSIGNMENTS = 256


def can_defer(training: bool) -> bool:
    """Return whether losses and slots can be computed later: not in training, autograd or torch.compile."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())


def _later(name: str) -> Any:
    return cached_property(lambda routing: getattr(routing.complete, name))


class DecodeRouting(Routing):
    """The routing of a few tokens. Slots and rows are computed only at their first access.

    Args:
        place: a function that returns the complete routing; None if `known` has all fields.
        known: the fields of `Routing` that are already computed, by name.
    """

    def __init__(self, place: Callable[[], Routing] | None = None, **known: Any) -> None:
        self.__dict__.update(known, place=place)

    @cached_property
    def complete(self) -> Routing:
        """The routing with all fields computed."""
        return self.__dict__["place"]()

    slots_TK = _later("slots_TK")
    counts_E = _later("counts_E")
    assigned_KE = _later("assigned_KE")
    dropped_K = _later("dropped_K")
    row_of_TK = _later("row_of_TK")
    source_of_R = _later("source_of_R")
    token_of_R = _later("token_of_R")
    tiles = None

    @cached_property
    def sources(self) -> list[list[int]]:
        """The assignments t * K + j of each expert, without those of padding."""
        num_experts, ids_TK = self.probs_TE.shape[1], self.expert_ids_TK
        if self.real_T is not None:
            ids_TK = torch.where(self.real_T.unsqueeze(1), ids_TK, num_experts)
        sources: list[list[int]] = [[] for _ in range(num_experts + 1)]
        # For so few assignments, Python lists are faster than sorting a tensor.
        for source, expert in enumerate(ids_TK.flatten().tolist()):
            sources[expert].append(source)
        return sources[:-1]

    @cached_property
    def groups(self) -> Groups:
        """The number of rows of each expert."""
        return Groups.of_host([len(own) for own in self.sources], self.expert_ids_TK.device)


def are_few(logits_TE: Tensor, config: MoEConfig, batch: MicroBatch) -> bool:
    """Return whether `decide_few` can route a micro-batch: few tokens on a CPU, and no capacity limit."""
    return (
        can_defer(batch.training)
        and 0 < len(logits_TE) * batch.top_k <= MOST_ASSIGNMENTS
        and logits_TE.device.type == "cpu"
        and config.backend != "triton"
        and config.choice == "tokens"
        and config.normalize_gate != "after"
        and not batch.capacity.is_limited
    )


def decide_few(logits_TE: Tensor, config: MoEConfig, batch: MicroBatch, gate: GateOutput) -> DecodeRouting:
    """Choose experts for a few tokens and return the routing, like `routing.decide` for many tokens."""
    chosen = choose(logits_TE, config, batch)
    return DecodeRouting(
        partial(placed, chosen, config, batch),
        expert_ids_TK=chosen.expert_ids_TK,
        weights_TK=scaled(chosen.weights_TK, config, batch.training),
        probs_TE=chosen.probs_TE,
        real_T=batch.real_T,
        capacity=None,
        gate=gate,
    )


def runs_few(experts: ExpertStack, routing: Routing) -> bool:
    """Return whether `run_few` can be used: `decide_few` made the routing, and the experts can be fused."""
    is_few = isinstance(routing, DecodeRouting) and routing.__dict__["place"] is not None
    return is_few and can_defer(experts.training) and experts.can_fuse


def run_few(experts: ExpertStack, x_TD: Tensor, routing: Any, weights: Weights) -> Tensor:
    """Run each expert that has rows, one at a time; return each token's weighted sum of outputs [T, D]."""
    weights_TK, own = routing.weights_TK, [sources for sources in routing.sources if sources]
    top_k, of_each = weights_TK.shape[1], weights.of_each(experts, routing.groups)
    rows = (x_TD[[source // top_k for source in sources]] if len(x_TD) > 1 else x_TD for sources in own)
    # `map` keeps the tensors of only one expert in memory at a time.
    outs = list(map(partial(_run_expert, experts), of_each, rows))
    if not outs:
        return experts.prepared({"y": x_TD.new_zeros(x_TD.shape)}, x_TD.device)["y"]
    outs_ND = torch.cat(outs) if len(outs) > 1 else outs[0]
    if (order := [source for sources in own for source in sources]) != list(range(weights_TK.numel())):
        outs_RD = outs_ND
        outs_ND = outs_RD.new_zeros(weights_TK.numel(), outs_RD.shape[1])
        outs_ND[order] = outs_RD
    weights_TK = weights_TK.to(outs_ND.dtype)
    if top_k == 1:
        return outs_ND.mul_(weights_TK)
    return torch.bmm(weights_TK.unsqueeze(1), outs_ND.view(len(x_TD), top_k, -1)).squeeze(1)


def _run_expert(experts: ExpertStack, tensors: Tensors, rows_nD: Tensor) -> Tensor:
    tensors = experts.prepared(tensors, rows_nD.device)
    rows_nD = rows_nD.to(tensors["fc1_weight"].dtype)
    return ffn_of_few(rows_nD, tensors, experts.config.activation)
