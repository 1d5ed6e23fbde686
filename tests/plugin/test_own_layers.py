"""Layers of a user's own model that a checkpoint could not hold are refused before training."""

from dataclasses import replace

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer, plugin
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology

plugin.register()
from fairseq_tutel.plugin.training.own_layers import _topology_of  # noqa: E402

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
def test_layers_on_different_ranks_are_refused(other, sentence, monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 4)
    with pytest.raises(ValueError, match=sentence):
        _topology_of({"a": layer(SPREAD), "b": layer(other)})
    assert _topology_of({"a": layer(SPREAD), "b": layer(SPREAD)}) is SPREAD


def test_a_buffer_of_the_experts_is_refused_unless_it_is_not_saved(monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 4)
    built = layer(SPREAD)
    built.experts.register_buffer("seen", torch.zeros(2), persistent=False)
    _topology_of({"a": built})
    built.experts.register_buffer("mean", torch.zeros(2))
    with pytest.raises(ValueError, match="the experts of a have the buffer mean"):
        _topology_of({"a": built})
