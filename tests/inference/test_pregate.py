"""With `--moe-pregate N`, each gate gets the input of the Nth MoE layer before its own layer.

The file tests/moe/test_rank_equality.py tests training with pre-gating on several ranks.
"""

import copy
import dataclasses
import pickle

import pytest
import torch
from compare import same_function
from option_values import ROUTING, mixed
from oracle import mixture
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer, pregate
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.expert_stack import Weights

D = 4
CONFIG = MoEConfig(model_dim=D, hidden_dim=5, num_experts=4)


def stack(ahead, *configs, topology=None):
    """Return float64 layers with gates that read the input of an earlier layer."""
    layers = [
        MoELayer(config, topology, seed=i, name=f"block {i}").double() for i, config in enumerate(configs)
    ]
    pregate(layers, ahead)
    return layers


def tokens(count=9, salt=0):
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(count, D, generator=generator, dtype=torch.float64)


def forward(layers, x, mask=None, between=torch.tanh):
    """Return the output and the balance loss of blocks with residual connections."""
    total = 0
    for layer in layers:
        y, output = layer(x, mask)
        x, total = x + between(y), total + output.balance_loss
    return x, total


def forward_by_loops(layers, ahead, x, factor, real):
    """Compute `forward` by loops, in which the gate of block b gets the input of block b - ahead."""
    inputs, total = [], 0
    for b, layer in enumerate(layers):
        inputs.append(x.masked_fill(~torch.tensor(real).unsqueeze(1), 0.0))
        seen = inputs[b - ahead] if b >= ahead else inputs[b]
        y, loss = mixture(layer, inputs[b], layer.config.top_k, factor, real, seen_TD=seen)
        x, total = x + torch.tanh(y), total + loss
    return x, total


@pytest.mark.parametrize("ahead", (0, 1, 2))
@pytest.mark.parametrize(("top_k", "factor"), [(2, 0.0), (1, 0.5)])
def test_pre_gated_layers_equal_a_computation_by_loops(ahead, top_k, factor):
    config = dataclasses.replace(CONFIG, top_k=top_k, capacity_factor=factor)
    configs = [dataclasses.replace(config, num_experts=count) for count in (4, 3, 5, 4)]
    layers, x = stack(ahead, *configs), tokens().requires_grad_()
    mask = torch.arange(9) % 4 == 2
    named = {f"{i}.{n}": p for i, layer in enumerate(layers) for n, p in layer.named_parameters()}

    def summed(y, loss):
        return torch.cat([y[~mask].flatten(), loss.view(1)])

    same_function(
        lambda: summed(*forward(layers, x, mask)),
        lambda: summed(*forward_by_loops(layers, ahead, x, factor, (~mask).tolist())),
        {"x": x, **named},
    )


OPTIONS = [
    *mixed(ROUTING),
    {"choice": "experts", "gate_type": "custom_parts.CalmGate", "residual": True},
    {"balance_loss": "gshard_sequence:1,z:0.1", "recompute_experts": True, "prescore": True},
    {"balance_loss": "load_importance", "gate_noise": 1.0, "capacity_factor": -0.5},
]


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_pre_gated_layer_with_any_options_routes_by_the_input_of_the_first_layer(options, training):
    config = dataclasses.replace(CONFIG, **options)
    pair, apart = stack(1, config, config), stack(0, config, config)
    x = tokens(12).view(3, 4, D)
    mask = torch.arange(12).view(3, 4) % 5 == 4
    for layer in (*pair, *apart):
        layer.train(training)
    torch.manual_seed(1)
    got, got_loss = forward(pair, x, mask)
    torch.manual_seed(1)
    call = Call.of(x, D, mask)
    routings = [layer.route(call.tokens(x), call) for layer in apart]
    for layer, routing in zip(apart, routings, strict=True):
        x = x + torch.tanh(layer.apply_routing(call.tokens(x), routing)).view(x.shape)
    losses = [layer.balance(routing).balance_loss for layer, routing in zip(apart, routings, strict=True)]
    assert torch.equal(got, x) and torch.equal(got_loss, sum(losses))
    for layer, other in zip(pair, apart, strict=True):
        if layer.balance_bias is not None:
            assert torch.equal(layer.balance_bias.load, other.balance_bias.load)


class Blocks(torch.nn.Module):
    def __init__(self, ahead):
        super().__init__()
        self.layers = torch.nn.ModuleList(stack(ahead, CONFIG, CONFIG, CONFIG))

    def forward(self, x):
        return forward(self.layers, x)[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_pre_gating_of_a_copied_model_does_not_use_the_original_model(copied):
    model, plain = Blocks(1), Blocks(0)
    model.layers[0](tokens())  # A copy leaves out this call's autograd graph.
    reference = copied(model)
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    expected = model(tokens())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reference(tokens()), expected)
    assert not torch.equal(plain(tokens()), expected)


def test_an_interrupted_forward_pass_does_not_affect_the_next_forward_pass():
    layers = stack(2, CONFIG, CONFIG, CONFIG, CONFIG)
    expected = forward(layers, tokens(7))[0]
    forward(layers[:3], tokens(9))
    assert torch.equal(forward(layers, tokens(7))[0], expected)
    forward(layers[:3], tokens(7))
    layers[0](tokens(7))
    with pytest.raises(ValueError, match="block 3 is pre-gated, but the layer 2 before it"):
        layers[3](tokens(7))
    pregate(layers, 0)
    conventional = stack(0, CONFIG, CONFIG, CONFIG, CONFIG)
    assert torch.equal(forward(layers, tokens(7))[0], forward(conventional, tokens(7))[0])


class Recorded(Weights):
    """Records all calls of a layer's default expert weights."""

    def __init__(self, block, events):
        self.block, self.events = block, events

    def prefetch(self, stack, groups):
        self.events.append(("expects", self.block, list(groups.host)))

    def of_groups(self, stack, groups):
        self.events.append(("uses", self.block, list(groups.host)))
        return super().of_groups(stack, groups)


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (1, ["expects 0", "expects 1", "uses 0", "expects 2", "uses 1", "uses 2"]),
        (2, ["expects 0", "expects 2", "uses 0", "expects 1", "uses 1", "uses 2"]),
    ],
)
def test_pre_gated_experts_are_prefetched_before_they_are_used(ahead, order):
    layers, events = stack(ahead, CONFIG, CONFIG, CONFIG), []
    for block, layer in enumerate(layers):
        layer.experts.compute_with(Recorded(block, events))
    forward(layers, tokens(7))
    assert [f"{what} {block}" for what, block, _ in events] == order
    given = {block: counts for what, block, counts in events if what == "expects"}
    assert {block: counts for what, block, counts in events if what == "uses"} == given


def _checkpointed(layers, reentrant, only):
    x = tokens().requires_grad_()
    for layer in layers:
        if layer in only:
            x = checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=reentrant)
        else:
            x = layer(x)[0]
    x.sum().backward()


WRONG = {
    "out of order": (lambda a, b: b(tokens()), "block 1 is pre-gated, but the layer 1 before it"),
    "twice": (lambda a, b: [a(tokens()), b(tokens()), b(tokens())], "was not called in this forward pass"),
    "other tokens": (lambda a, b: [a(tokens(3)), b(tokens(4))], "the same tokens and arguments"),
    "other k": (lambda a, b: [a(tokens()), b(tokens(), top_k=1)], "'top_k': 1"),
    "checkpointed": (lambda a, b: _checkpointed((a, b), False, (a, b)), "activation checkpointing"),
    "a gate without gradients": (lambda a, b: _checkpointed((a, b), True, (a,)), "without gradients"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_of_pre_gated_layers_raise_an_error(case):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        call(*stack(1, CONFIG, CONFIG))


def test_an_invalid_value_of_pregate_raises_an_error():
    for ahead in (2, -1, 1.0):
        sentence = rf"pregate \(--moe-pregate\) is {ahead!r} but the stack has 2 MoE layers; give 1 to 1\."
        with pytest.raises(ValueError, match=sentence):
            stack(ahead, CONFIG, CONFIG)
