"""What the log says of a model when it is built."""

from torch import nn

import fairseq_tutel as ft
from fairseq_tutel import plugin
from fairseq_tutel.plugin.announce import log_size, sizes

plugin.register()
D, H, E, K, V = 4, 6, 8, 2, 10


def test_a_token_meets_its_own_experts_and_all_else_and_tied_weights_count_once():
    model = nn.Module()
    model.embedding = nn.Embedding(V, D)
    model.moe = ft.MoELayer(ft.MoEConfig(D, H, E, top_k=K, shared_experts=1))
    model.output = nn.Linear(D, V, bias=False)
    model.output.weight = model.embedding.weight
    matrices, expert, gate = 2 * D * H, 2 * D * H + D + H, D * E
    total, active, flops, experts = sizes(model)
    assert total == sum(p.numel() for p in model.parameters()) == V * D + (E + 1) * expert + gate
    assert active == V * D + (K + 1) * expert + gate
    assert experts == E * expert
    assert flops == 2 * (V * D + (K + 1) * matrices + gate)


def test_the_log_has_the_number_of_parameters_of_all_ranks(caplog):
    model = nn.Sequential(ft.MoELayer(ft.MoEConfig(D, H, E)), nn.Linear(D, V))
    with caplog.at_level("INFO", "fairseq_tutel"):
        log_size(model)
    experts, total = (sum(p.numel() for p in m.parameters()) for m in (model[0].experts, model))
    assert f"parameters on all ranks: {total:,}, of experts: {experts:,}, active per tok" in caplog.text
