"""The decode path against the general path, and the work that it avoids."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch
from compare import TOLERANCE, close
from normal import normal
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_tutel import MoEConfig, MoELayer, Topology
from fairseq_tutel.kernels import reference
from fairseq_tutel.kernels.few_rows import linear_of_few
from fairseq_tutel.moe import layer as layer_module
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.decode import MOST_ASSIGNMENTS, DecodeRouting
from fairseq_tutel.moe.expert_stack import Weights
from fairseq_tutel.moe.gates import BiasedGate
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

CONFIG = MoEConfig(model_dim=6, hidden_dim=7, num_experts=4, top_k=1)
CASES = {
    "top-1": {},
    "one expert": {"num_experts": 1},
    "top-2": {"top_k": 2},
    "all, glu": {"top_k": 4, "expert_type": "glu", "routed_scaling_factor": 2.5},
    "no biases": {"top_k": 2, "expert_bias": False, "normalize_gate": "none", "activation": "gelu"},
    "sigmoid, bias, groups, beside": {
        "top_k": 2, "score_function": "sigmoid", "balance_bias": True, "expert_groups": 2,
        "groups_per_token": 1, "shared_experts": 1, "residual": True, "balance_loss": "gshard_all:1,z:1",
    },
    "masks, CMR": {"top_k": 2, "eom": 0.25, "fom": 0.2, "cmr": True, "cmr_gate_drop": 0.3},
    "hash": {"top_k": 3, "gate_type": "hash"},
    "cosine": {"top_k": 2, "gate_type": "cosine", "gate_projection_dim": 3},
}  # fmt: skip


def build(dtype=torch.float32, seed=1, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=seed).to(dtype).eval()


def tokens(count: int, dtype=torch.float32) -> torch.Tensor:
    return normal(count, 6, seed=3, dtype=dtype)


def both(monkeypatch, layer, x_TD, mask=None):
    """Return the layer's outputs by the decode path and by the general path."""
    call = {"token_ids": torch.arange(len(x_TD)), "padding_mask": mask}
    with torch.no_grad(), monkeypatch.context() as patch:
        got = layer(x_TD, **call)
        patch.setattr(layer_module, "are_few", lambda *_: False)
        expected = layer(x_TD, **call)
    assert type(got[1].routing) is DecodeRouting and type(expected[1].routing) is Routing
    return got, expected


@pytest.mark.parametrize("padding", ("none", "some", "all"))
@pytest.mark.parametrize("case", CASES)
def test_the_decode_path_equals_the_general_path(monkeypatch, case, padding):
    layer = build(**CASES[case])
    for count in (1, 11, MOST_ASSIGNMENTS // layer.config.top_k):
        mask = None if padding == "none" else (torch.arange(count) % 3 == 1) | (padding == "all")
        (y, output), (expected, general) = both(monkeypatch, layer, tokens(count), mask)
        close(y, expected, f"{count} tokens")
        assert torch.equal(output.balance_loss, general.balance_loss)
        assert output.losses.keys() == general.losses.keys()
        for name, tensor in vars(general.routing).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(getattr(output.routing, name), tensor), name


def fields(output):
    """Return the tensors of a MoEOutput and its routing, by name."""
    losses, routing = {"total": output.balance_loss, **output.losses}, output.routing
    names = [field.name for field in dataclasses.fields(Routing) if field.name not in ("gate", "capacity")]
    return {**losses, **{name: getattr(routing, name) for name in names}, "logits": routing.gate.logits_TE}


SINGLE = [case for case in CASES if case not in ("hash", "cosine")]


@torch.no_grad()
@pytest.mark.parametrize("time_first", (False, True))
@pytest.mark.parametrize("count", (1, 6, 30))
@pytest.mark.parametrize("case", SINGLE)
def test_the_shorter_way_has_the_bits_of_the_decode_path(monkeypatch, case, count, time_first):
    layer, x = build(**CASES[case]), tokens(count).view(-1, min(count, 3), 6)
    is_taken = "sigmoid" not in case and "masks" not in case
    assert layer.decodes(x, time_first) is is_taken
    y, output = layer(x, time_first=time_first)
    monkeypatch.setattr(layer, "decodes", lambda *_: False)
    expected, general = layer(x, time_first=time_first)
    assert torch.equal(y, expected) and y.shape == x.shape
    got, wanted = fields(output), fields(general)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor is got[name] is None or torch.equal(got[name], tensor), name


def hooked(layer, x):
    layer.experts.register_forward_hook(lambda module, args, y: 2 * y)


def hooked_gate(layer, x):
    layer.gate.register_forward_hook(lambda module, args, logits: -logits)


def other_weights(layer, x):
    own = {name: 2 * tensor for name, tensor in layer.experts.expert_parameters().items()}
    layer.experts.compute_with(Weights(own))


def earlier_router(layer, x):
    routing = layer.route(x.view(1, 6), Call.of(x, 6))
    layer.route_by(SimpleNamespace(routing_of=lambda *_: routing))


def replaced_gate(layer, x):
    layer.gate = BiasedGate(layer.config)
    torch.nn.init.ones_(layer.gate.weight)
    torch.nn.init.normal_(layer.gate.bias)


def own_forward(layer, x):
    forward = layer.experts.forward
    layer.experts.forward = lambda *args: 2 * forward(*args)


def own_forward_of_the_gate(layer, x):
    forward = layer.gate.forward
    layer.gate.forward = lambda x_TD: -forward(x_TD)


def own_route(layer, x):
    route = layer.route
    layer.route = lambda x_TD, call: route(-x_TD, call)


def shared_experts(layer, x):
    layer.beside = build(shared_experts=1).beside


def bias(layer, x):
    layer.balance_bias = build(balance_bias=True).balance_bias
    layer.balance_bias.bias.copy_(torch.tensor([0, 0, 0, 9]))


CHANGES = (
    hooked, hooked_gate, other_weights, earlier_router, replaced_gate, own_forward,
    own_forward_of_the_gate, own_route, shared_experts, bias,
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_takes_the_shorter_way_with(change):
    layer, x = build(), tokens(1)
    assert layer.decodes(x, False)
    before, _ = layer(x)
    change(layer, x)
    assert not layer.decodes(x, False)
    assert change is earlier_router or not torch.equal(layer(x)[0], before)


@torch.no_grad()
def test_hooks_of_all_modules_see_the_gate():
    layer, x, seen = build(), tokens(1), []
    hook = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        layer(x)
    finally:
        hook.remove()
    assert layer.gate in seen


class Doubled(MoELayer):
    def apply_routing(self, x_TD, routing, local=False):
        return 2 * super().apply_routing(x_TD, routing, local)


@torch.no_grad()
def test_a_subclass_can_replace_a_step():
    x = tokens(1)
    assert torch.equal(Doubled(CONFIG, seed=1).eval()(x)[0], 2 * build()(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("options", ({"score_function": "sigmoid"}, {"top_k": 2}, {"expert_groups": 2}))
def test_options_of_the_gate_alone_take_the_general_path(options):
    own = dataclasses.replace(CONFIG, **options)
    layer, x = MoELayer(CONFIG, seed=1, gate_configs=[own]).eval(), tokens(3)
    assert not layer.decodes(x, False)
    assert torch.equal(layer(x)[1].routing.weights_TK, build(**options)(x)[1].routing.weights_TK)


LATE = (
    {"capacity_factor": 0.2}, {"rsample": True}, {"balance_loss": "z"},
    {"top_k": 2, "second_expert_policy": "random"},
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("options", LATE, ids=str)
def test_later_changes_of_the_layer_change_no_result(options):
    layer, x = build(**options), tokens(20)
    assert layer.decodes(x, False)
    (_, output), (_, expected) = layer(x), layer(x)
    wanted = fields(expected)
    layer.train()
    if "balance_loss" in options:
        layer.configure(CONFIG, [CONFIG])
    got = fields(output)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor is got[name] is None or torch.equal(got[name], tensor), name


@torch.no_grad()
def test_copies():
    layer, x = build(), tokens(3)
    y, output = layer(x)
    data = pickle.dumps(output)
    assert b"MoELayer" not in data  # a saved result has no weights
    assert torch.equal(pickle.loads(data).balance_loss, output.balance_loss)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.decodes(x, False) and torch.equal(copied(x)[0], y)


@torch.no_grad()
def test_a_compiled_layer_stores_nothing(monkeypatch):
    layer = build()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    before = dict(vars(layer))
    assert not layer.decodes(tokens(1), False) and vars(layer) == before


def test_what_the_shorter_way_needs():
    layer, x = build(), tokens(1)
    assert not layer.decodes(x, False)  # gradients
    with torch.no_grad():
        assert layer.decodes(x, False)
        assert not layer.decodes(x, True)  # time_first needs three dimensions
        assert layer.decodes(tokens(MOST_ASSIGNMENTS), False)
        assert not layer.decodes(tokens(MOST_ASSIGNMENTS + 1), False)
        assert not layer.decodes(tokens(0), False)
        assert not layer.decodes(x.double(), False) and not build(torch.float64).decodes(x, False)
        assert not build().to(torch.bfloat16).decodes(x, False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not layer.decodes(x, False)
        for options in (*GENERAL.values(), *({**CASES[case]} for case in ("masks, CMR", "hash", "cosine"))):
            assert not build(**options).decodes(x, False), options
        mask = torch.ones(1, dtype=torch.bool)
        assert not layer(x, padding_mask=mask)[0].any()
        assert layer(x, top_k=2)[1].routing.expert_ids_TK.shape == (1, 2)
        with pytest.raises(ValueError, match="model_dim is 6"):
            layer(x.view(2, 3))
        assert not layer.train().decodes(x, False)


@torch.no_grad()
def test_a_later_change_of_the_gate_does_not_change_a_routing():
    layer, x = build(), tokens(3)
    output, expected = layer(x)[1], layer(x)[1].balance_loss
    layer.gate.weight.neg_()
    assert torch.equal(output.balance_loss, expected)


@torch.no_grad()
def test_the_shorter_way_uses_new_weights_and_options():
    layer, x = build(), tokens(1)
    before, _ = layer(x)
    layer.load_state_dict(build(seed=2).state_dict())
    loaded, _ = layer(x)
    assert torch.equal(loaded, build(seed=2)(x)[0]) and not torch.equal(loaded, before)
    config = dataclasses.replace(CONFIG, top_k=2)
    layer.configure(config, [config])
    assert layer(x)[1].routing.expert_ids_TK.shape == (1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_in_every_dtype_and_with_ties(monkeypatch, dtype):
    layer = build(dtype, top_k=2)
    layer.gate.weight.data[2:] = layer.gate.weight[:2]  # of two equal experts the first
    (y, output), (expected, _) = both(monkeypatch, layer, tokens(11, dtype))
    assert y.dtype == dtype and (output.routing.expert_ids_TK[:, 0] < 2).all()
    close(y, expected, "y")


@pytest.mark.parametrize("mask", (None, torch.ones(11, dtype=torch.bool)), ids=("", "padding"))
def test_under_autocast(monkeypatch, mask):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (y, _), (expected, _) = both(monkeypatch, build(top_k=2), tokens(11), mask)
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected, "y")


GENERAL = {
    "experts choose": {"choice": "experts"},
    "a capacity": {"eval_capacity_factor": 1.0},
    "normalised later": {"normalize_gate": "after", "top_k": 2},
    "prescore": {"prescore": True},
    "a norm": {"hidden_layer_norm": True},
    "own experts": {"expert_type": "custom_parts.DeepExpert"},
}


@pytest.mark.parametrize("options", GENERAL.values(), ids=GENERAL)
def test_these_options_take_the_general_path(options):
    with torch.no_grad():
        assert type(build(**options)(tokens(3))[1].routing) is Routing


def test_so_do_many_tokens_none_and_training():
    layer = build()
    assert type(layer(tokens(3))[1].routing) is Routing
    with torch.no_grad():
        for count, kind in ((0, Routing), (1, DecodeRouting), (MOST_ASSIGNMENTS + 1, Routing)):
            y, output = layer(tokens(count))
            assert type(output.routing) is kind and len(y) == count
        assert type(layer.train()(tokens(3))[1].routing) is Routing


@torch.no_grad()
def test_an_earlier_layers_routing_takes_either_path():
    first, second, x_TD = build(top_k=2), MoELayer(CONFIG, seed=2).eval(), tokens(5)
    routing = first.route(x_TD, Call.of(x_TD, 6))
    y_TD = second.apply_routing(x_TD, routing)
    second.experts.register_forward_hook(lambda *_: None)  # a hook needs all rows
    close(second.apply_routing(x_TD, routing), y_TD, "y")


@torch.no_grad()
def test_a_routing_with_other_fields_takes_the_general_path():
    layer, x_TD = build(), tokens(5)
    routing = layer.route(x_TD, Call.of(x_TD, 6))
    twice = dataclasses.replace(routing, weights_TK=2 * routing.weights_TK)
    assert routing.is_deferred and not twice.is_deferred
    unrouted = dataclasses.replace(routing, row_of_TK=torch.full_like(routing.row_of_TK, -1))
    assert not layer.apply_routing(x_TD, unrouted).any()
    close(layer.apply_routing(x_TD, twice), 2 * layer.apply_routing(x_TD, routing), "y")


def test_results_that_are_not_read_are_not_computed(monkeypatch):
    layer = MoEFeedForward(CONFIG, Topology(), 1, "decoder.layers.0.fc1").eval()
    calls = []
    for name in ("balance_losses", "decide"):
        made = getattr(layer_module, name)
        monkeypatch.setattr(layer_module, name, lambda *a, made=made: calls.append(made) or made(*a))
    x, mask = tokens(6).view(2, 3, 6), torch.arange(6).view(3, 2) == 5
    layer.begin_call(mask)
    with torch.no_grad():
        layer(x)
        layer.begin_micro_batch()
        layer(x)
    assert not calls
    record, copied, pickled = (layer.record, *(copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))))
    layer.begin_micro_batch()
    layer(x)  # with gradients, computed at once
    assert len(calls) == 2
    for late in (record, copied.record, pickled.record):
        assert torch.equal(late.balance_loss, layer.record.balance_loss)
        assert late.losses.keys() == layer.record.losses.keys()
        for name, tensor in vars(layer.record.tally).items():
            assert torch.equal(getattr(late.tally, name), tensor), name
    with pytest.raises(AttributeError, match="no attribute 'lost'"):
        _ = record.lost


@pytest.mark.parametrize("rows", (1, 2, 3, 8, 9))
@pytest.mark.parametrize("inner", (5, 512, 1025))
def test_a_map_of_few_rows(rows, inner):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((rows, inner), (9, inner), (9,)))
    for own_bias in (bias, None):
        out = linear_of_few(x, weight, own_bias)
        assert out.is_contiguous()
        expected = torch.empty(rows, 9)
        close(out, reference.linear(x, weight, own_bias, expected), "out", 2e-4)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@torch.no_grad()
def test_one_token_takes_few_operations():
    layer = MoEFeedForward(CONFIG, Topology(), 1, "decoder.layers.0.fc1").eval()
    with Count() as count:
        layer(tokens(1).view(1, 1, 6))
    assert len(count.names) <= 31, count.names
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in count.names)
