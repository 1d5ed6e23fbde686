"""All code that reads a routing ignores left-out assignments, even first choices; see `Routing`."""

import dataclasses

import oracle
import pytest
import torch
from compare import close
from normal import normal

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe import routing as routing_module
from fairseq_tutel.moe.balance import LOSSES, balance_losses
from fairseq_tutel.moe.call import Call

T, E, K, D = 9, 4, 2, 6
CONFIG = MoEConfig(
    model_dim=D, hidden_dim=8, num_experts=E, top_k=K, gate_noise=1.0, second_expert_policy="random"
)
# The first choice of tokens 2 and 5 and the second choice of tokens 5 and 7 are left out. Token 4 is
# padding.
REQUESTED = torch.ones(T, K, dtype=torch.bool)
REQUESTED[2, 0] = REQUESTED[5, 0] = REQUESTED[5, 1] = REQUESTED[7, 1] = False
PADDING = torch.arange(T) == 4
EXISTS = REQUESTED & ~PADDING.unsqueeze(1)


@pytest.fixture(autouse=True)
def left_out(monkeypatch):
    monkeypatch.setattr(routing_module, "sampled_choices", lambda weights_TK: REQUESTED)


def routed(topology=None, **options):
    """Return a layer, tokens, and the tokens' routing."""
    layer = MoELayer(dataclasses.replace(CONFIG, **options), topology, seed=1).double()
    x_TD = normal(T, D, seed=3).masked_fill(PADDING.unsqueeze(1), 0.0)
    torch.manual_seed(5)  # seed for the gate's noise
    return layer, x_TD, layer.route(x_TD, Call.of(x_TD, D, PADDING))


def by_loop(layer, x_TD, r, prescore=False):
    """Return every token's sum over its assignments, without those that were left out."""
    rows = []
    for t in range(T):
        y_D = torch.zeros(D, dtype=torch.float64)
        for j in range(K):
            if EXISTS[t, j]:
                e, weight = int(r.expert_ids_TK[t, j]), r.weights_TK[t, j]
                if prescore:
                    y_D = y_D + oracle.one_expert(layer.experts, e, weight * x_TD[t])
                else:
                    y_D = y_D + weight * oracle.one_expert(layer.experts, e, x_TD[t])
        rows.append(y_D)
    return torch.stack(rows)


def test_slot_minus_1_is_the_only_mark_of_a_left_out_assignment():
    _, _, r = routed()
    assert ((r.expert_ids_TK >= 0) & (r.expert_ids_TK < E)).all()
    assert torch.equal(r.slots_TK >= 0, EXISTS) and torch.equal(r.row_of_TK >= 0, EXISTS)
    counts = [int((r.expert_ids_TK[EXISTS] == e).sum()) for e in range(E)]
    assert r.counts_E.tolist() == r.assigned_KE.sum(0).tolist() == counts
    assert r.assigned_KE.sum(1).tolist() == EXISTS.sum(0).tolist() == [6, 6]
    assert r.dropped_K.tolist() == [0, 0]
    assert int(r.num_tokens) == T - 1
    assert list(r.groups.host) == counts


@pytest.mark.parametrize("options", ({}, {"prescore": True}, {"hidden_layer_norm": True}), ids=str)
def test_experts_do_not_compute_left_out_assignments(options):
    layer, x_TD, r = routed(**options)
    y_TD = layer.apply_routing(x_TD, r)
    close(y_TD, by_loop(layer, x_TD, r, prescore="prescore" in options), "y")
    assert not y_TD[~EXISTS.any(1)].any()


def test_losses_do_not_count_left_out_assignments_as_load_or_tokens():
    _, _, r = routed()
    losses = balance_losses(dict.fromkeys(LOSSES, 1.0), r, r.gate)
    assert all(loss.isfinite() for loss in losses.values())
    probs_TE = r.probs_TE.masked_fill(PADDING.unsqueeze(1), 0.0)
    mean_E = probs_TE.sum(0) / (T - 1)
    for name, load_E in (("gshard", r.assigned_KE[0]), ("gshard_all", r.assigned_KE.sum(0))):
        expected = E * (load_E / load_E.sum() * mean_E).sum()
        assert losses[name].item() == pytest.approx(expected.item()), name
    assert losses["gshard_sequence"].item() == pytest.approx(losses["gshard_all"].item())
    assert losses["gshard_global"].item() == pytest.approx(losses["gshard_all"].item())
    square_T = torch.logsumexp(r.gate.logits_TE, 1).square()[~PADDING]
    assert losses["z"].item() == pytest.approx(square_T.mean().item())
