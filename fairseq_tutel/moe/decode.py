"""The decode path: a shorter path through a MoE layer for few tokens on a CPU without gradients.

Reading the weights takes most of the time. The layer's output needs only each token's experts and weights.
Slots, counts and row maps are computed at their first access. The results equal the results of
`routing.decide` and of the fused FFN (`expert_ffn`). T tokens, D model_dim, E experts, K top_k, N = T * K
assignments, R rows, n rows of one expert.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.capacity import MicroBatch
from fairseq_tutel.moe.choice import choose
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights
from fairseq_tutel.moe.routing import GateOutput, Routing, placed, scaled

# The decode path is faster up to this number of assignments.
MOST_ASSIGNMENTS = 256


def can_defer(training: bool) -> bool:
    """Return whether losses and slots may be computed later: no training, gradients or tracing."""
    return not (training or torch.is_grad_enabled() or torch.compiler.is_compiling())


def _later(name: str) -> Any:
    return cached_property(lambda routing: getattr(routing.complete, name))


class DecodeRouting(Routing):
    """The routing of a few tokens, which computes slots and rows only at their first access.

    Args:
        place: returns the complete routing; None if `known` has all fields.
        known: the fields of `Routing` that are known, by name.
    """

    def __init__(self, place: Callable[[], Routing] | None = None, **known: Any) -> None:
        self.__dict__.update(known, place=place)

    @cached_property
    def complete(self) -> Routing:
        """The routing with all fields."""
        return self.__dict__["place"]()

    slots_TK = _later("slots_TK")
    counts_E = _later("counts_E")
    assigned_KE = _later("assigned_KE")
    dropped_K = _later("dropped_K")
    num_tokens = _later("num_tokens")
    row_of_TK = _later("row_of_TK")
    source_of_R = _later("source_of_R")
    token_of_R = _later("token_of_R")

    @cached_property
    def assignments(self) -> dict[int, list[int]]:
        """The assignments t * K + j of each expert that has tokens, by expert ID. One read by the host."""
        ids_TK = self.expert_ids_TK
        if self.real_T is not None:
            ids_TK = torch.where(self.real_T.unsqueeze(1), ids_TK, -1)
        assignments: dict[int, list[int]] = {}
        # For so few numbers, Python lists are faster than sorting a tensor.
        for assignment, expert in enumerate(ids_TK.flatten().tolist()):
            assignments.setdefault(expert, []).append(assignment)
        assignments.pop(-1, None)
        return dict(sorted(assignments.items()))

    @cached_property
    def groups(self) -> Groups:
        """The groups of rows: the number of rows of each expert."""
        counts = [0] * self.probs_TE.shape[1]
        for expert, own in self.assignments.items():
            counts[expert] = len(own)
        return Groups.of_host(counts, self.expert_ids_TK.device)


def are_few(logits_TE: Tensor, config: MoEConfig, batch: MicroBatch) -> bool:
    """Return whether `decide_few` can route a micro-batch: few tokens on a CPU that are never dropped."""
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
    """Choose experts for a few tokens and return the routing, as `routing.decide` does for many."""
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
    """Return whether `run_few` can compute a routing: one of `decide_few`, and fused experts."""
    is_few = isinstance(routing, DecodeRouting) and routing.__dict__["place"] is not None
    return is_few and can_defer(experts.training) and experts.can_fuse


def run_few(experts: ExpertStack, x_TD: Tensor, routing: Any, weights: Weights) -> Tensor:
    """Run the experts that have rows one by one, and return each token's weighted sum of outputs [T, D]."""
    run = partial(_run_expert, experts)
    # `map` keeps the tensors of only one expert in memory at a time.
    outs = list(map(run, weights.of_each(experts, routing.groups), _dispatch(x_TD, routing)))
    if not outs:
        return experts.prepared({"y": x_TD.new_zeros(x_TD.shape)}, x_TD.device)["y"]
    return _combine(outs, routing)


def _run_expert(experts: ExpertStack, tensors: Tensors, rows_nD: Tensor) -> Tensor:
    tensors = experts.prepared(tensors, rows_nD.device)
    rows_nD = rows_nD.to(tensors["fc1_weight"].dtype)
    return ffn_of_few(rows_nD, tensors, experts.config.activation)


def _dispatch(x_TD: Tensor, routing: DecodeRouting) -> Sequence[Tensor]:
    """Return, for each expert that has tokens, the token vectors [n, D] that it must compute."""
    of_experts = routing.assignments.values()
    if len(x_TD) == 1:  # no expert can have two rows
        return [x_TD] * len(of_experts)
    top_k = routing.expert_ids_TK.shape[1]
    tokens = [assignment // top_k for own in of_experts for assignment in own]
    token_of_R = torch.tensor(tokens, dtype=torch.int64, device=x_TD.device)
    return x_TD.index_select(0, token_of_R).split([len(own) for own in of_experts])


def _combine(outs: Sequence[Tensor], routing: DecodeRouting) -> Tensor:
    """Return each token's weighted sum of expert outputs, [T, D]. `outs` has the order of `_dispatch`."""
    rows = [assignment for own in routing.assignments.values() for assignment in own]
    return _weighted(_in_order(outs, rows, routing.weights_TK.numel()), routing.weights_TK)


def _weighted(outs_ND: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted sum of the outputs of its assignments [T, D]; may overwrite outs_ND."""
    weights_TK = weights_TK.to(outs_ND.dtype)
    num_tokens, top_k = weights_TK.shape
    if top_k == 1:
        return outs_ND.mul_(weights_TK)
    return torch.bmm(weights_TK.unsqueeze(1), outs_ND.view(num_tokens, top_k, -1)).squeeze(1)


def _in_order(outs: Sequence[Tensor], rows: Sequence[int], num_assignments: int) -> Tensor:
    """Return the experts' outputs [N, D] in the order of the assignments, with zeros for padding."""
    if len(outs) == 1 and len(rows) == num_assignments:
        return outs[0]
    row_of_N = [len(rows)] * num_assignments
    for row, assignment in enumerate(rows):
        row_of_N[assignment] = row
    if len(outs) == num_assignments:
        return torch.cat([outs[row] for row in row_of_N])
    padding = () if len(rows) == num_assignments else (outs[0].new_zeros(1, outs[0].shape[1]),)
    index_N = torch.tensor(row_of_N, device=outs[0].device)
    return torch.cat((*outs, *padding)).index_select(0, index_N)
