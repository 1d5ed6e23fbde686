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
from fairseq_tutel.moe.on_demand import OnDemand
from fairseq_tutel.moe.routing import GateOutput, Routing, chosen_by, placed, scaled
from fairseq_tutel.moe.slots import Capacity

# Copies up to which calls count; with more, products do.
MOST_COPIES = 256


class FewTokens(OnDemand, Routing):
    """The routing of few tokens: who goes to whom, and on demand where."""

    @cached_property
    def copies(self) -> dict[int, list[int]]:
        """The copies t * K + j of each expert that has any, by expert: from one read on the host."""
        ids_TK, none = self.expert_ids_TK, self.probs_TE.shape[1]
        if self.real_T is not None:
            ids_TK = torch.where(self.real_T.unsqueeze(1), ids_TK, none)
        copies: dict[int, list[int]] = {}
        # Of so few numbers lists are made sooner than tensors are sorted.
        for copy, expert in enumerate(ids_TK.flatten().tolist()):
            copies.setdefault(expert, []).append(copy)
        copies.pop(none, None)
        return dict(sorted(copies.items()))

    @cached_property
    def groups(self) -> Groups:
        """Rows of each expert."""
        counts = [0] * self.probs_TE.shape[1]
        for expert, own in self.copies.items():
            counts[expert] = len(own)
        return Groups.of_host(counts, self.expert_ids_TK.device)

    @cached_property
    def rows(self) -> list[int]:
        """The copy that fills each row."""
        return [copy for own in self.copies.values() for copy in own]


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
    if len(x_TD) == 1:  # no expert has two rows
        return [x_TD] * len(routing.copies)
    top_k = routing.expert_ids_TK.shape[1]
    tokens = [copy // top_k for copy in routing.rows]
    token_of_R = torch.tensor(tokens, dtype=torch.int64, device=x_TD.device)
    return x_TD.index_select(0, token_of_R).split([len(own) for own in routing.copies.values()])


def combine_few(outs: Sequence[Tensor], routing: FewTokens) -> Tensor:
    """Return every token's weighted sum [T, D] of what its experts gave for `dispatch_few`'s rows."""
    weights_TK = routing.weights_TK.to(outs[0].dtype)
    num_tokens, top_k = weights_TK.shape
    copies_ND = _in_order(outs, routing.rows, num_tokens * top_k)
    if top_k == 1:
        return copies_ND.mul_(weights_TK)
    copies_TKD = copies_ND.view(num_tokens, top_k, -1)
    return torch.bmm(weights_TK.unsqueeze(1), copies_TKD).squeeze(1)


def _in_order(outs: Sequence[Tensor], rows: Sequence[int], num_copies: int) -> Tensor:
    """Return what experts gave copy by copy [N, D]; zeros for padding."""
    if len(outs) == 1 and len(rows) == num_copies:
        return outs[0]
    row_of_N = [len(rows)] * num_copies
    for row, copy in enumerate(rows):
        row_of_N[copy] = row
    if len(outs) == num_copies:
        return torch.cat([outs[row] for row in row_of_N])
    padding = () if len(rows) == num_copies else (outs[0].new_zeros(1, outs[0].shape[1]),)
    index_N = torch.tensor(row_of_N, device=outs[0].device)
    return torch.cat((*outs, *padding)).index_select(0, index_N)
