"""Training does not start if a checkpoint could not store the MoE layers of a user's model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairseq_tutel import MoEConfig, MoELayer, plugin
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.gradients import is_expert
from fairseq_tutel.parallel.groups import Topology

plugin.register()
from fairseq_tutel.plugin.feed_forward import MoEFeedForward  # noqa: E402
from fairseq_tutel.plugin.training import own_layers  # noqa: E402
from fairseq_tutel.plugin.training.own_layers import _topology_of, prepare  # noqa: E402

SPREAD = Topology(world_size=4, expert_parallel_size=2)


def layer(topology):
    return MoELayer(MoEConfig(model_dim=2, hidden_dim=2, num_experts=4), topology)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (replace(SPREAD, expert_parallel_size=4), "a has its experts on 2 ranks, but b on 4"),
        (replace(SPREAD, world_size=2), "b has its experts in a group of 2 of the 4 ranks"),
    ],
)
def test_moe_layers_with_different_ep_groups_are_refused(other, sentence, monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 4)
    with pytest.raises(ValueError, match=sentence):
        _topology_of({"a": layer(SPREAD), "b": layer(other)})
    assert _topology_of({"a": layer(SPREAD), "b": layer(SPREAD)}) is SPREAD


def test_a_persistent_buffer_of_experts_is_refused(monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 4)
    built = layer(SPREAD)
    built.experts.register_buffer("seen", torch.zeros(2), persistent=False)
    _topology_of({"a": built})
    built.experts.register_buffer("mean", torch.zeros(2))
    with pytest.raises(ValueError, match="the experts of a have the buffer mean"):
        _topology_of({"a": built})


def test_generation_in_validation_is_refused_if_experts_are_on_several_ranks(monkeypatch):
    monkeypatch.setattr(world, "size", lambda: SPREAD.world_size)
    monkeypatch.setattr(own_layers, "start_together", lambda *_: None)
    root = SimpleNamespace(task=SimpleNamespace(eval_bleu=True))
    with pytest.raises(ValueError, match="--eval-bleu is set, but ranks generate different numbers"):
        own_layers.prepare(root, None, nn.ModuleDict({"own": layer(SPREAD)}))


def beside(topology):
    """Return a model with one MoE layer of the plugin and one MoE layer of a user."""
    config = MoEConfig(model_dim=2, hidden_dim=2, num_experts=4)
    model = nn.ModuleDict({"placed": MoEFeedForward(config, topology, 1, "placed"), "own": layer(topology)})
    for parameter in model["own"].experts.parameters():
        parameter.expert = True  # as a user's `scan_expert_func` marks experts
    prepare(None, None, model)
    return model


def test_data_parallelism_ignores_experts_that_are_spread_over_ranks(monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 4)
    model = beside(SPREAD)
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert set(model._ddp_params_and_buffers_to_ignore) == experts
    assert {name.partition(".")[0] for name in experts} == {"placed", "own"}


def test_data_parallelism_reduces_gradients_of_experts_that_all_ranks_have():
    model = beside(Topology())
    assert not any(map(is_expert, model.parameters()))
    assert model._ddp_params_and_buffers_to_ignore == []
