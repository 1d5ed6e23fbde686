"""PyTorch tools such as deepcopy, pruning and parametrization work on a MoE layer."""

import copy
import dataclasses

import pytest
import torch
from compare import close
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.adaptive import weights_of
from fairseq_tutel.parallel.gradients import is_expert
from fairseq_tutel.parallel.groups import Topology, slice_of

CONFIG = MoEConfig(model_dim=4, hidden_dim=6, num_experts=4, activation="gelu")
PARTS = ({}, {"hidden_layer_norm": True}, {"recompute_experts": True})


def build(size: int = 1, seed: int = 1, **options) -> MoELayer:
    topology = Topology(world_size=size, rank=0, expert_parallel_size=size)
    return MoELayer(dataclasses.replace(CONFIG, **options), topology, seed=seed)


def tokens() -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(2))


def assigned(layer: MoELayer) -> MoELayer:
    layer.load_state_dict(build(seed=9).state_dict(), strict=False, assign=True)
    return layer


def through_meta(layer: MoELayer) -> MoELayer:
    return layer.to("meta").to_empty(device="cpu")


@pytest.mark.parametrize("size", (1, 2, 8))
@pytest.mark.parametrize(
    "replace", (assigned, through_meta, copy.deepcopy, MoELayer.double), ids=lambda f: f.__name__
)
def test_replaced_parameters_of_experts_are_still_marked_as_expert_parameters(replace, size):
    # With 8 ranks, each expert has two shards. The state dict that `assigned` loads has all experts.
    layer = build(size, expert_grad_norm="sqrt_world_size", parallel_type="model")
    before = {name: p for name, p in layer.named_parameters() if size > 1 or name[:1] != "e"}
    slices = {name: slice_of(p) for name, p in layer.named_parameters()}
    after = replace(layer)
    replaced = [p is not before.get(name) for name, p in after.named_parameters()]
    assert all(replaced) or replace is MoELayer.double
    for name, parameter in after.named_parameters():
        of_experts = name.startswith("experts.")
        assert is_expert(parameter) == (of_experts and size > 1), name
        assert getattr(parameter, "root_scaled", False) == of_experts, name
        assert slice_of(parameter) == slices[name], name
    assert size < 8 or {s.count for name, s in slices.items() if name[:1] == "e"} == {2}


def step(layer: MoELayer) -> Tensor:
    """Run one SGD step and return the layer's output."""
    y, output = layer(tokens())
    (y.square().sum() + output.balance_loss).backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return y.detach()


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_pruned_experts_train_like_experts_whose_pruned_weights_stay_zero(options):
    layer, plain = build(**options), build(**options)
    mask = torch.arange(4 * 6 * 4).view(4, 6, 4) % 3 > 0
    prune.custom_from_mask(layer.experts, "fc1_weight", mask)
    for _ in range(3):
        with torch.no_grad():
            plain.experts.fc1_weight *= mask
        close(step(layer), step(plain), "y of a step")
    assert (layer.experts.fc1_weight_orig[~mask] == build().experts.fc1_weight[~mask]).all()
    prune.remove(layer.experts, "fc1_weight")
    close(layer(tokens())[0], step(layer), "y after it was made permanent")


class Twice(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_parametrized_experts_compute_with_the_parametrized_weights(options):
    layer, plain = build(**options), build(**options)
    names = layer.experts.names
    for name in names:
        parametrize.register_parametrization(layer.experts, name, Twice())
    with torch.no_grad():
        for name in names:
            getattr(plain.experts, name).mul_(2)
    y, _ = layer(tokens())
    close(y, plain(tokens())[0], "y")
    y.sum().backward()
    plain(tokens())[0].sum().backward()
    for name in names:
        original = layer.experts.parametrizations[name].original
        close(original.grad, 2 * getattr(plain.experts, name).grad, name)


def test_gathering_pruned_experts_raises_an_error():
    layer = build(2)
    prune.l1_unstructured(layer.experts, "fc1_bias", 0.5)
    with pytest.raises(ValueError, match="prune"):
        weights_of(layer.experts, layer.topology, 1, torch.device("cpu"))
