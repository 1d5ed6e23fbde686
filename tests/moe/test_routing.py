"""Compares routing with a reference in Python loops, and checks invariants on which the layer relies."""

import itertools

import oracle
import pytest
import torch
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, Routing, route
from fairseq_tutel.moe.choice import choose_experts
from fairseq_tutel.moe.routing import decide, padded
from fairseq_tutel.moe.slots import Capacity, MicroBatch

E = 5


def logits(num_tokens: int, seed: int = 0, num_experts: int = E) -> Tensor:
    return normal(num_tokens, num_experts, seed=seed)


def some_padding(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % 3 != 1


def check_against_loops(r: Routing, expected: oracle.Plan) -> None:
    assert r.slots_TK.tolist() == expected.slots
    assert r.counts_E.tolist() == expected.counts
    assert r.assigned_KE.tolist() == expected.assigned
    assert r.dropped_K.tolist() == expected.dropped
    assert (r.row_of_TK >= 0).tolist() == expected.kept


def check_maps(r: Routing) -> None:
    """Check that a routing's two row maps are inverse to each other and group rows by expert."""
    row_of = r.row_of_TK.flatten().tolist()
    source_of = r.source_of_R.tolist()
    assert [source_of[row] for row in row_of if row >= 0] == [
        source for source, row in enumerate(row_of) if row >= 0
    ]
    filled = [row for row, source in enumerate(source_of) if source >= 0]
    assert [row_of[source_of[row]] for row in filled] == filled
    assert len(filled) == int(r.counts_E.sum())
    ids = r.expert_ids_TK.flatten().tolist()
    slots = r.slots_TK.flatten().tolist()
    if r.capacity is None:
        starts = [0, *itertools.accumulate(r.counts_E.tolist())]
    else:
        starts = [e * r.capacity for e in range(len(r.counts_E))]
    for row in filled:
        source = source_of[row]
        assert row == starts[ids[source]] + slots[source]


@pytest.mark.parametrize("top_k", range(1, E + 1))
@pytest.mark.parametrize("factor", (0.0, 0.4, 1.0, 1.25, -0.4, -1.0))
@pytest.mark.parametrize("padded", (False, True))
def test_routing_equals_a_computation_by_loops(top_k, factor, padded):
    num_tokens = 23
    logits_TE = logits(num_tokens, seed=top_k)
    real_T = some_padding(num_tokens) if padded else None
    r = route(logits_TE, top_k, factor, real_T=real_T)
    real = None if real_T is None else real_T.tolist()
    expected = oracle.plan(logits_TE.tolist(), top_k, factor, real)
    assert r.expert_ids_TK.tolist() == expected.expert_ids
    check_against_loops(r, expected)
    check_maps(r)
    assert int(r.num_tokens) == (num_tokens if real is None else sum(real))


def test_routing_zero_tokens_gives_zero_counts():
    r = route(logits(0), 2, 1.0)
    assert r.counts_E.tolist() == [0] * E
    assert r.assigned_KE.tolist() == [[0] * E] * 2
    assert r.dropped_K.tolist() == [0, 0]
    assert r.source_of_R.numel() == 0
    assert int(r.num_tokens) == 0


@pytest.mark.parametrize("top_k", range(1, E + 1))
def test_a_token_chooses_the_lower_id_of_experts_with_equal_scores(top_k):
    scores_TE = torch.tensor([[1.0, 1, 1, 1, 1], [0, 2, 1, 2, 1], [0, 0, 0, 0, 3], [3, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 3, 4], [1, 3, 2, 4, 0], [4, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert choose_experts(scores_TE, top_k).tolist() == [row[:top_k] for row in expected]


@pytest.mark.parametrize(
    "factor, num_tokens, top_k, expected",
    [
        (1.0, 10, 1, 2),
        (1.0, 11, 1, 3),
        (1.0, 11, 2, 6),
        (1.25, 10, 2, 6),
        (-1.25, 10, 2, 6),
        (0.01, 10, 3, 3),
    ],
)
def test_capacity_is_top_k_times_the_rounded_up_tokens_per_expert(factor, num_tokens, top_k, expected):
    crowded_TE = torch.arange(E, 0, -1.0).expand(num_tokens, E)  # All tokens prefer low expert IDs.
    r = route(crowded_TE, top_k, factor)
    assert r.counts_E.tolist() == [expected] * top_k + [0] * (E - top_k)
    assert r.dropped_K.tolist() == [num_tokens - expected] * top_k


def test_padding_does_not_change_the_routing_of_real_tokens():
    logits_TE, real_T = logits(14), some_padding(14)
    padded, alone = route(logits_TE, 2, 0.7, real_T=real_T), route(logits_TE[real_T], 2, 0.7)
    assert torch.equal(padded.slots_TK[real_T], alone.slots_TK)
    assert torch.equal(padded.row_of_TK[real_T], alone.row_of_TK)
    assert torch.equal(padded.counts_E, alone.counts_E)
    assert torch.equal(padded.assigned_KE, alone.assigned_KE)
    assert torch.equal(padded.dropped_K, alone.dropped_K)
    assert (padded.row_of_TK[~real_T] == -1).all()


@pytest.mark.parametrize("top_k", (1, 2))
@pytest.mark.parametrize("factor", (0.0, 0.5))
@pytest.mark.parametrize("spare", (0, 3))
def test_each_expert_has_a_separate_block_of_rows_in_a_padded_routing(top_k, factor, spare):
    batch = MicroBatch(top_k=top_k, capacity=Capacity(factor=factor), real_T=some_padding(17))
    compact = decide(logits(17, seed=2), MoEConfig(1, 1, E), batch)
    r = padded(compact, int(compact.counts_E.max()) + spare)
    assert r.capacity == int(r.counts_E.max()) + spare
    assert r.source_of_R.shape == (E * r.capacity,)
    check_maps(r)
