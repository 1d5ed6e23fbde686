"""Initial weights: they depend on the seed and the layer's name, but not on the number of ranks."""

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.experts import Experts
from fairseq_tutel.parallel.groups import Part, Topology

CONFIG = MoEConfig(model_dim=16, hidden_dim=40, num_experts=6, expert_type="glu")


def experts(first: int = 0, count: int = 6, seed: int = 1, name: str = "decoder.0") -> Experts:
    module = Experts(CONFIG, Part(count, first))
    module.reset_parameters(seed, name)
    return module


@pytest.mark.parametrize("size", (1, 2, 3, 6))
def test_experts_are_equal_for_any_number_of_ranks(size):
    whole = experts().expert_parameters()
    count = 6 // size
    parts = [experts(i * count, count).expert_parameters() for i in range(size)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name


def test_a_layer_has_equal_initial_weights_for_any_topology():
    whole = MoELayer(CONFIG, seed=3, name="a")
    part = MoELayer(CONFIG, Topology(world_size=3, rank=1, expert_parallel_size=3), seed=3, name="a")
    assert torch.equal(part.gate.weight, whole.gate.weight)
    for name, tensor in part.experts.expert_parameters().items():
        assert torch.equal(tensor, whole.experts.expert_parameters()[name][2:4]), name


@pytest.mark.parametrize("change", [{"seed": 2}, {"name": "encoder.0"}], ids=str)
def test_experts_differ_by_seed_and_by_name(change):
    for name, tensor in experts().expert_parameters().items():
        assert not (tensor == experts(**change).expert_parameters()[name]).any(), name


def test_weights_and_biases_have_the_range_of_linear_layers():
    for name, tensor in experts().expert_parameters().items():
        fan_in = 40 if name.startswith("fc2") else 16
        bound = fan_in**-0.5
        assert 0.9 * bound < float(tensor.detach().abs().max()) <= bound, name


def test_without_a_seed_the_global_generator_draws_one():
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(8)
        layers = [MoELayer(CONFIG), MoELayer(CONFIG)]
        return [layer.experts.fc1_weight.detach() for layer in layers]

    first, second = weights()
    assert not torch.equal(first, second)
    assert torch.equal(first, weights()[0])
