"""Metrics: Meta's, against a direct computation by loops."""

import math

import pytest
import torch
from torch import Tensor

from fairseq_tutel import route, routing_metrics


def logits(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)


def direct_metrics(routing, real: list[bool]) -> dict[str, float]:
    """Meta's definitions, by loops."""
    num_experts = routing.probs_TE.shape[1]
    tokens = [t for t, r in enumerate(real) if r]
    entropies = [-sum(p * math.log(p) for p in routing.probs_TE[t].tolist()) for t in tokens]
    metrics = {"entropy_gating": sum(entropies) / max(len(tokens), 1)}
    for j in range(routing.assigned_KE.shape[0]):
        ids = [int(routing.expert_ids_TK[t, j]) for t in tokens]
        dropped = sum(int(routing.row_of_TK[t, j]) < 0 for t in tokens)
        load = sorted(100 * ids.count(e) / max(len(tokens), 1) for e in range(num_experts))
        fifth = max(math.ceil(0.2 * num_experts), 1)
        metrics[f"expert{j + 1}_balance_top"] = sum(load[-fifth:])
        metrics[f"expert{j + 1}_balance_bottom"] = sum(load[:fifth])
        metrics[f"unused_expert{j + 1}_count"] = load.count(0)
        metrics[f"overflow_expert{j + 1}"] = 100 * dropped / max(len(tokens), 1)
    return metrics


@pytest.mark.parametrize("num_experts", (1, 3, 5, 6, 11))
@pytest.mark.parametrize("factor", (0.0, 0.5))
@pytest.mark.parametrize("num_real", (0, 1, 13))
def test_metrics_are_metas(num_experts, factor, num_real):
    real = [t < num_real for t in range(15)]
    routing = route(logits(15, num_experts), min(num_experts, 3), factor, real_T=torch.tensor(real))
    got = {name: float(value) for name, value in routing_metrics(routing).items()}
    expected = direct_metrics(routing, real)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def test_metrics_without_padding_count_every_token():
    routing = route(logits(15, 4), 2, 0.5)
    got = {name: float(value) for name, value in routing_metrics(routing).items()}
    assert got == pytest.approx(direct_metrics(routing, [True] * 15), rel=1e-5)
    assert got["overflow_expert2"] > 0


def test_metrics_are_finite_where_a_probability_underflows():
    routing = route(torch.tensor([[0.0, -1e4], [-1e4, 0.0]]), 1)
    assert float(routing_metrics(routing)["entropy_gating"]) == 0.0


def test_metrics_carry_no_gradient():
    metrics = routing_metrics(route(logits(4, 3).requires_grad_(), 2))
    assert not any(value.requires_grad for value in metrics.values())
