"""Tests the parameter counts that the plugin logs when fairseq builds a model."""

from torch import nn

import fairseq_tutel as ft
from fairseq_tutel import plugin
from fairseq_tutel.plugin.announce import sizes

plugin.register()
D, H, E, K, V = 4, 6, 8, 2, 10


def test_active_parameters_count_top_k_experts_and_each_tied_weight_once():
    model = nn.Module()
    model.embedding = nn.Embedding(V, D)
    model.moe = ft.MoELayer(ft.MoEConfig(D, H, E, top_k=K, shared_experts=1))
    model.output = nn.Linear(D, V, bias=False)
    model.output.weight = model.embedding.weight
    expert, gate = 2 * D * H + D + H, D * E
    total, active, experts = sizes(model)
    assert total == sum(p.numel() for p in model.parameters()) == V * D + (E + 1) * expert + gate
    assert active == V * D + (K + 1) * expert + gate
    assert experts == E * expert
