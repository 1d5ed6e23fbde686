"""The tests compare metrics with a direct computation by loops."""

import math

import pytest
import torch
from normal import normal as logits

from fairseq_tutel import route, routing_metrics
from fairseq_tutel.moe.metrics import count_routing, metric_names, metric_rows


def direct_metrics(routing, real: list[bool]) -> dict[str, float]:
    """Compute all metrics by loops over the assignments that have a slot."""
    num_experts = routing.probs_TE.shape[1]
    top_k = routing.assigned_KE.shape[0]
    tokens = [t for t, r in enumerate(real) if r]
    entropies = [-sum(p * math.log(p) for p in routing.probs_TE[t].tolist()) for t in tokens]
    assignments = [(t, j) for t in tokens for j in range(top_k) if int(routing.slots_TK[t, j]) >= 0]
    ids = {(t, j): int(routing.expert_ids_TK[t, j]) for t, j in assignments}
    lost = [(t, j) for t, j in assignments if int(routing.row_of_TK[t, j]) < 0]
    load = [list(ids.values()).count(e) for e in range(num_experts)]
    metrics = {
        "entropy_gating": sum(entropies) / max(len(tokens), 1),
        "moe_dropped": 100 * len(lost) / max(len(assignments), 1),
        "moe_max_violation": max(load) / max(sum(load) / num_experts, 1e-9),
        "moe_dead_experts": load.count(0),
    }
    for j in range(top_k):
        chosen = [e for (_, choice), e in ids.items() if choice == j]
        dropped = sum(choice == j for _, choice in lost)
        load = sorted(100 * chosen.count(e) / max(len(tokens), 1) for e in range(num_experts))
        fifth = max(math.ceil(0.2 * num_experts), 1)
        metrics[f"expert{j + 1}_balance_top"] = sum(load[-fifth:])
        metrics[f"expert{j + 1}_balance_bottom"] = sum(load[:fifth])
        metrics[f"unused_expert{j + 1}_count"] = load.count(0)
        metrics[f"overflow_expert{j + 1}"] = 100 * dropped / max(len(chosen), 1)
        weights = [float(routing.weights_TK[t, j]) for t in tokens]
        metrics[f"expert{j + 1}_weight"] = sum(weights) / max(len(tokens), 1)
    return metrics


@pytest.mark.parametrize("num_experts", (1, 3, 5, 6, 11))
@pytest.mark.parametrize("factor", (0.0, 0.5))
@pytest.mark.parametrize("num_real", (0, 1, 13))
def test_metrics_equal_a_computation_by_loops(num_experts, factor, num_real):
    real = [t < num_real for t in range(15)]
    routing = route(logits(15, num_experts), min(num_experts, 3), factor, real_T=torch.tensor(real))
    got = {name: float(value) for name, value in routing_metrics(routing).items()}
    expected = direct_metrics(routing, real)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def test_the_entropy_metric_is_zero_if_gate_probabilities_underflow():
    routing = route(torch.tensor([[0.0, -1e4], [-1e4, 0.0]]), 1)
    assert float(routing_metrics(routing)["entropy_gating"]) == 0.0


def test_metric_rows_has_one_row_per_layer_in_the_order_of_layers():
    sizes = (4, 4, 7, 4)
    routings = [route(logits(15, size, seed=seed), 2, 0.5) for seed, size in enumerate(sizes)]
    rows_LN, tokens_L1 = metric_rows([count_routing(routing) for routing in routings])
    assert tokens_L1.tolist() == [[15.0]] * 4
    for routing, row in zip(routings, rows_LN.tolist(), strict=True):
        got = dict(zip(metric_names(2), row, strict=True))
        assert got == pytest.approx(direct_metrics(routing, [True] * 15), rel=1e-5)


def test_metrics_of_expert_choice_equal_direct_counts():
    scores = logits(12, 3).index_fill(0, torch.tensor([5, 7]), -9.0)
    scores[:, 0] += torch.arange(12) % 2  # Different experts prefer different tokens.
    routing = route(scores, 1, 1.5, choice="experts", score_function="sigmoid")
    assert routing.weights_TK.shape[1] == 3  # At least one token is chosen by all 3 experts.
    untaken = int((routing.slots_TK < 0).all(dim=1).sum())
    assert untaken >= 2
    got = {name: float(value) for name, value in routing_metrics(routing).items()}
    assert [*got] == metric_names(1)
    assert got["overflow_expert1"] == pytest.approx(100 * untaken / 12)
    assert got["moe_dropped"] == got["moe_dead_experts"] == got["unused_expert1_count"] == 0
    assert got["moe_max_violation"] == 1
    assert got["expert1_weight"] == pytest.approx(float(routing.weights_TK[:, 0].mean()))


def test_metrics_sum_half_precision_values_in_fp32():
    routing = route(logits(4096, 4).bfloat16(), 2)
    got = {name: float(value) for name, value in routing_metrics(routing).items()}
    assert got == pytest.approx(direct_metrics(routing, [True] * 4096), rel=1e-4)
