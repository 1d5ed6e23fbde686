"""The step of few tokens on a CPU, as in decoding: what it costs is the weights to read, and then calls.

In evaluation without gradients, where nothing is dropped and no row leaves the rank, y takes no more than
who goes to whom: slots, row maps, loads and losses are made when somebody reads them (`on_demand`).
The twin is `decide` and the experts' one node (`expert_ffn`).

T tokens, D model_dim, E experts, K top_k, N = T * K copies, R rows: the copies of real
tokens, n of an expert.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.choice import MicroBatch, Rules
from fairseq_tutel.moe.dispatch import token_of
from fairseq_tutel.moe.on_demand import OnDemand
from fairseq_tutel.moe.routing import GateOutput, Routing, chosen_by, placed, scaled
from fairseq_tutel.moe.slots import Capacity

# Copies up to which calls count; with more, products do.
MOST_COPIES = 256


class FewTokens(OnDemand, Routing):
    """The routing of few tokens: who goes to whom, and on demand where."""

    @cached_property
    def asked(self) -> Tensor:
        """The expert of each copy t * K + j; E of a padding token's."""
        ids_TK = self.expert_ids_TK
        if self.real_T is not None:
            ids_TK = torch.where(self.real_T.unsqueeze(1), ids_TK, self.probs_TE.shape[1])
        return ids_TK.reshape(-1)

    @cached_property
    def groups(self) -> Groups:
        """Rows of each expert, from one read of numbers on the host."""
        num_experts = self.probs_TE.shape[1]
        counts = self.asked.bincount(minlength=num_experts).tolist()[:num_experts]
        return Groups.of_host(counts, self.asked.device)

    @cached_property
    def copy_of(self) -> Tensor:
        """The copy that fills each row."""
        order_N = self.asked.argsort(stable=True)  # padding behind all others
        return order_N[: sum(self.groups.host)]


def are_few(logits_TE: Tensor, top_k: int, capacity: Capacity, rules: Rules) -> bool:
    """Whether tokens of which nobody needs a gradient may go this way."""
    return (
        0 < len(logits_TE) * top_k <= MOST_COPIES
        and logits_TE.device.type == "cpu"
        and rules.backend != "triton"
        and rules.choice == "tokens"
        and rules.normalize_gate != "after"
        and not capacity.is_limited
    )


def decide_few(
    logits_TE: Tensor,
    top_k: int,
    capacity: Capacity,
    rules: Rules,
    batch: MicroBatch,
    bias_E: Tensor | None,
    gate: GateOutput,
) -> FewTokens:
    """Choose experts for few tokens; see `routing.decide`."""
    chosen = chosen_by(logits_TE, top_k, rules, batch, bias_E)
    return FewTokens(
        partial(placed, chosen, capacity, rules, batch),
        expert_ids_TK=chosen.expert_ids_TK,
        weights_TK=scaled(chosen.weights_TK, rules),
        probs_TE=chosen.probs_TE,
        real_T=batch.real_T,
        capacity=None,
        gate=gate,
    )


def dispatch_few(x_TD: Tensor, routing: FewTokens) -> Sequence[Tensor]:
    """Return the rows [n, D] of each expert that has any."""
    counts = [count for count in routing.groups.host if count]
    if len(x_TD) == 1:  # no expert has two rows
        return [x_TD] * len(counts)
    return x_TD.index_select(0, token_of(routing.copy_of, routing.expert_ids_TK.shape[1])).split(
        counts
    )


def combine_few(outs: Sequence[Tensor], routing: FewTokens) -> Tensor:
    """Return every token's weighted sum [T, D] of what its experts gave for `dispatch_few`'s rows."""
    weights_TK = routing.weights_TK.to(outs[0].dtype)
    num_tokens, top_k = weights_TK.shape
    if len(outs) == 1 and len(outs[0]) == num_tokens * top_k:
        copies_ND = outs[0]  # in their order
    else:  # zeros stay where padding is
        copies_ND = outs[0].new_zeros(num_tokens * top_k, outs[0].shape[1])
        copies_ND.index_copy_(0, routing.copy_of, torch.cat(tuple(outs)))
    if top_k == 1:
        return copies_ND.mul_(weights_TK)
    copies_TKD = copies_ND.view(num_tokens, top_k, -1)
    return torch.bmm(weights_TK.unsqueeze(1), copies_TKD).squeeze(1)
