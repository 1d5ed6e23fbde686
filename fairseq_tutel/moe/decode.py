"""The decode path: a shorter path through a MoE layer for few tokens on a CPU without gradients.

Reading the weights takes most of the time. The layer's output needs only each token's experts and weights.
Slots, row maps and losses are computed at their first access. The results equal the results of
`routing.decide` and of the fused FFN (`expert_ffn`). T tokens, D model_dim, E experts, K top_k, N = T * K
assignments, R rows, n rows of one expert.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.reference_route import softmax_top_k
from fairseq_tutel.moe.capacity import MicroBatch, capacity_of
from fairseq_tutel.moe.choice import choose, ways_of
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.deferred import Deferred
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights
from fairseq_tutel.moe.routing import GateOutput, Routing, placed, scaled

# The decode path is faster up to this number of assignments.
MOST_ASSIGNMENTS = 256


class DecodeRouting(Deferred, Routing):
    """The routing of a few tokens, which computes slots and rows only at their first access."""

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
    """Return whether a micro-batch is small enough, and its configuration suitable, for the decode path."""
    return (
        0 < len(logits_TE) * batch.top_k <= MOST_ASSIGNMENTS
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


def is_plain(config: MoEConfig) -> bool:
    """Return whether the options of a layer allow `route_and_run`."""
    batch = MicroBatch(top_k=config.top_k, capacity=capacity_of(config, training=False))
    return (
        config.choice == "tokens"
        and list(config.gate_types) == ["linear"]
        and config.backend != "triton"
        and config.score_function == "softmax"
        and config.normalize_gate != "after"
        and not (config.prescore or config.shared_experts or config.residual or config.cmr or config.fom)
        and not (config.balance_bias or ways_of(config, batch) or batch.capacity.is_limited)
    )


def route_and_run(
    x_TD: Tensor,
    logits_TE: Tensor,
    experts: ExpertStack,
    config: MoEConfig,
    compute: Callable[[], Routing],
) -> tuple[Tensor, DecodeRouting]:
    """Route a few tokens and run their experts, with as few steps as possible.

    Between two calls, the model evicts this code from the CPU's caches, so each step takes microseconds.
    The bits equal the bits of `decide_few` and `run_few`. Tokens, logits and experts must be in fp32, and
    the experts must be this rank's parameters.

    Args:
        x_TD: the tokens; none is padding.
        logits_TE: the gate's logits.
        experts: the experts.
        config: the options of the layer; see `is_plain`.
        compute: returns the complete routing.

    Returns:
        The outputs [T, D], and the routing, which calls `compute` when other fields are read.
    """
    top_k = config.top_k
    normalize = config.normalize_gate == "before" and top_k > 1
    probs_TE, ids_TK, weights_TK = softmax_top_k(logits_TE, top_k, normalize)
    weights_TK = scaled(weights_TK, config, training=False)
    routing = DecodeRouting(
        compute, expert_ids_TK=ids_TK, weights_TK=weights_TK, probs_TE=probs_TE, real_T=None, capacity=None
    )
    stacks = [(name, getattr(experts, name)) for name in experts.names]

    def run(e: int, rows_nD: Tensor) -> Tensor:
        return ffn_of_few(rows_nD, {name: stack[e] for name, stack in stacks}, experts.config.activation)

    if len(x_TD) == 1:
        outs = [run(e, x_TD) for e in ids_TK.flatten().tolist()]
        return _weighted(outs[0] if top_k == 1 else torch.cat(outs), weights_TK), routing
    outs = list(map(run, routing.assignments, _dispatch(x_TD, routing)))
    return _combine(outs, routing), routing


def run_few(experts: ExpertStack, x_TD: Tensor, routing: DecodeRouting, weights: Weights) -> Tensor:
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
