"""The tests compare expert-choice routing (experts choose tokens) with brute force and with loops."""

import dataclasses
import math

import oracle
import pytest
import torch
from compare import same_function
from hypothesis import given, settings
from hypothesis import strategies as st
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer, route
from fairseq_tutel.moe.routing import decide
from fairseq_tutel.moe.slots import Capacity, MicroBatch

E = 4
EXPERTS = {"choice": "experts"}


def logits(num_tokens: int, seed: int = 0, num_experts: int = E) -> Tensor:
    return normal(num_tokens, num_experts, seed=seed)


def places_of(factor: float, top_k: int, num_real: int, num_experts: int = E) -> int:
    return top_k * math.ceil((abs(factor) or 1.0) * num_real / num_experts)


def taken_by_loops(scores, places: int, real: list[bool]) -> list[list[int]]:
    """Choose tokens for every expert by brute force, in the order of the expert's slots."""
    tokens = [t for t in range(len(scores)) if real[t]]
    num_experts = len(scores[0]) if scores else E
    return [sorted(tokens, key=lambda t: (-scores[t][e], t))[:places] for e in range(num_experts)]


def taken(r) -> list[list[int]]:
    """Return the tokens of every expert in a routing, in the order of the expert's slots."""
    by_expert: list[dict[int, int]] = [{} for _ in r.counts_E]
    for t, (ids, slots) in enumerate(zip(r.expert_ids_TK.tolist(), r.slots_TK.tolist(), strict=True)):
        for e, slot in zip(ids, slots, strict=True):
            if slot >= 0:
                assert slot not in by_expert[e]
                by_expert[e][slot] = t
    return [[chosen[slot] for slot in range(len(chosen))] for chosen in by_expert]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=14),
    top_k=st.integers(1, 3),
    factor=st.sampled_from([0.0, 0.3, 1.0, 1.5, -0.5, 9.0]),
    pads=st.integers(0, 4),
    function=st.sampled_from(["softmax", "sigmoid"]),
)
def test_experts_choose_the_tokens_that_brute_force_chooses(rows, top_k, factor, pads, function):
    # Few different logits cause ties, and padding may be at any position.
    logits_TE = torch.tensor(rows, dtype=torch.float64).view(len(rows), 3)
    real = [(t * 7) % 4 >= pads for t in range(len(rows))]
    r = route(
        logits_TE, top_k, factor, real_T=torch.tensor(real, dtype=torch.bool), score_function=function,
        **EXPERTS,
    )  # fmt: skip
    scores = (torch.sigmoid(logits_TE) if function == "sigmoid" else logits_TE.softmax(1)).tolist()
    places = places_of(factor, top_k, sum(real), 3)
    expected = taken_by_loops(scores, places, real) if rows else [[], [], []]
    assert taken(r) == expected
    # Each expert fills its slots as long as there are real tokens.
    assert r.counts_E.tolist() == [min(places, sum(real))] * 3
    assert r.assigned_KE.tolist() == [r.counts_E.tolist()] + [[0] * 3] * (top_k - 1)
    all_padding = sum(real) - len({t for tokens in expected for t in tokens})
    assert r.dropped_K.tolist() == [all_padding] + [0] * (top_k - 1)
    assert int(r.num_tokens) == sum(real)
    rows_of = r.row_of_TK[r.row_of_TK >= 0].tolist()
    assert sorted(rows_of) == list(range(sum(r.counts_E.tolist())))
    for t, ids in enumerate(r.expert_ids_TK.tolist()):
        mine = [e for e, s in zip(ids, r.slots_TK[t].tolist(), strict=True) if s >= 0]
        assert mine == sorted(set(mine))
        weights = [w for w, s in zip(r.weights_TK[t].tolist(), r.slots_TK[t], strict=True) if s >= 0]
        assert weights == pytest.approx([scores[t][e] for e in mine])


def decided(logits_TE: Tensor, rule: Capacity, real_T: Tensor):
    config = MoEConfig(1, 1, E, **EXPERTS)
    return decide(logits_TE, config, MicroBatch(top_k=2, capacity=rule, real_T=real_T))


@pytest.mark.parametrize(
    # The capacities are 6, 4, 3 and 10 slots; a buffer may have more rows per expert.
    "rule, rows",
    [
        (Capacity(), 8),
        (Capacity(factor=0.5), 5),
        (Capacity(token_fraction=0.25), 5),
        (Capacity(factor=9.0), 10),
    ],
    ids=str,
)
def test_expert_choice_on_gpus_finds_buffer_sizes_without_a_host_synchronization(rule, rows):
    """On a GPU, the host cannot read the number of rows without a synchronization."""
    real_T = torch.ones(10, dtype=torch.bool)
    on_cpu = decided(logits(10), rule, real_T)
    r = decided(logits(10).to("meta"), rule, real_T.to("meta"))
    assert r.expert_ids_TK.shape == r.weights_TK.shape == r.row_of_TK.shape == (10, E)
    assert r.source_of_R.shape == (rows * E,)
    assert int(on_cpu.counts_E.max()) <= rows
    assert on_cpu.source_of_R.shape == (int(on_cpu.counts_E.sum()),)


CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=E, top_k=1, activation="gelu", choice="experts")


def tokens(*shape: int) -> Tensor:
    return normal(*shape, CONFIG.model_dim, seed=6).requires_grad_()


def by_loop(layer: MoELayer, x_TD: Tensor, factor: float, real: list[bool]) -> Tensor:
    """Compute the layer by a loop: each expert chooses tokens and adds its weighted outputs."""
    config = layer.config
    scores_TE = x_TD @ layer.gate.weight.t()
    sigmoid = config.score_function == "sigmoid"
    scores_TE = torch.sigmoid(scores_TE) if sigmoid else torch.softmax(scores_TE, 1)
    places = places_of(factor, config.top_k, sum(real))
    chosen = taken_by_loops(scores_TE.tolist(), places, real)
    y = [0 * x_D for x_D in x_TD]
    for e, mine in enumerate(chosen):
        for t in mine:
            weight = scores_TE[t, e]
            if config.normalize_gate == "after":
                weight = weight / sum(scores_TE[t, o] for o in range(E) if t in chosen[o])
            if config.prescore:
                y[t] = y[t] + oracle.one_expert(layer.experts, e, weight * x_TD[t])
            else:
                y[t] = y[t] + weight * oracle.one_expert(layer.experts, e, x_TD[t])
    return torch.stack(y)


@pytest.mark.parametrize("factor", (0.0, 0.5, -2.0))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize(
    "options",
    [{}, {"score_function": "sigmoid", "normalize_gate": "after"}, {"prescore": True, "top_k": 2}],
    ids=str,
)
def test_the_expert_choice_layer_equals_a_loop_over_experts(factor, padded, options):
    config = dataclasses.replace(CONFIG, capacity_factor=factor, **options)
    layer, x = MoELayer(config, seed=5).double(), tokens(11)
    mask = torch.arange(11) % 4 == 1 if padded else torch.zeros(11, dtype=torch.bool)
    same_function(
        lambda: layer(x, mask if padded else None)[0],
        lambda: by_loop(layer, x, factor, (~mask).tolist()),
        {"x": x, **dict(layer.named_parameters())},
    )
