"""The decode path returns the results of the general path, and computes losses only if they are read."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch
from compare import TOLERANCE, close
from normal import normal
from torch.nn.modules.module import register_module_forward_hook

from fairseq_tutel import MoEConfig, MoELayer, Topology
from fairseq_tutel.moe import layer as layer_module
from fairseq_tutel.moe.decode import MOST_ASSIGNMENTS, DecodeRouting
from fairseq_tutel.moe.expert_stack import Weights
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
    "cosine": {"top_k": 2, "gate_type": "cosine", "gate_projection_dim": 3},
}  # fmt: skip


def build(dtype=torch.float32, seed=1, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=seed).to(dtype).eval()


def tokens(count: int, dtype=torch.float32) -> torch.Tensor:
    return normal(count, 6, seed=3, dtype=dtype)


def both(monkeypatch, layer, x_TD, mask=None):
    """Return the outputs of the layer's decode path and of its general path."""
    call = {"padding_mask": mask}
    with torch.no_grad(), monkeypatch.context() as patch:
        got = layer(x_TD, **call)
        patch.setattr(layer_module, "are_few", lambda *_: False)
        expected = layer(x_TD, **call)
    assert type(got[1].routing) is DecodeRouting and type(expected[1].routing) is Routing
    return got, expected


@pytest.mark.parametrize("padding", ("none", "some", "all"))
@pytest.mark.parametrize("case", CASES)
def test_the_decode_path_and_the_general_path_return_equal_outputs(monkeypatch, case, padding):
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


def hooked_experts(layer):
    layer.experts.register_forward_hook(lambda module, args, y: 2 * y)


def hooked_gate(layer):
    layer.gate.register_forward_hook(lambda module, args, logits: -logits)


def other_weights(layer):
    own = {name: 2 * tensor for name, tensor in layer.experts.expert_parameters().items()}
    layer.experts.compute_with(Weights(own))


def forward_of_one_object(layer):
    forward = layer.experts.forward
    layer.experts.forward = lambda *args: 2 * forward(*args)


def earlier_router(layer):
    route = layer.route
    layer.router = SimpleNamespace(routing_of=lambda _, x_TD, call: route(-x_TD, call))


def custom_experts(layer):
    layer.experts = build(expert_type="custom_parts.DeepExpert").experts


def subclass_of_experts(layer):
    class Doubled(type(layer.experts)):
        def run(self, *args):
            return 2 * super().run(*args)

    layer.experts.__class__ = Doubled


def shared_experts(layer):
    layer.beside = build(shared_experts=1).beside


CHANGES = (
    hooked_experts, hooked_gate, other_weights, forward_of_one_object, earlier_router, custom_experts,
    subclass_of_experts, shared_experts,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_decode_path_uses_hooks_and_replaced_parts_of_the_layer(change):
    layer, x = build(), tokens(3)
    with torch.no_grad():
        before, _ = layer(x)
        change(layer)
        y, _ = layer(x)
    close(y, layer(x)[0], "the output without gradients")
    assert not torch.equal(y, before)


@torch.no_grad()
def test_global_module_hooks_run_for_the_gate_and_the_experts():
    layer, seen = build(), []
    hook = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        layer(tokens(1))
    finally:
        hook.remove()
    assert layer.gate in seen and layer.experts in seen


@torch.no_grad()
def test_later_changes_of_the_layer_do_not_change_an_earlier_output():
    layer, x = build(top_k=2, second_expert_policy="random"), tokens(20)
    (_, output), (_, expected) = layer(x), layer(x)
    names = [field.name for field in dataclasses.fields(Routing) if field.name not in ("gate", "capacity")]
    wanted = {name: getattr(expected.routing, name) for name in names}, expected.balance_loss
    layer.gate.weight.neg_()
    layer.train().configure(dataclasses.replace(CONFIG, balance_loss="z"), [CONFIG])
    for name, tensor in wanted[0].items():
        got = getattr(output.routing, name)
        assert tensor is got is None or torch.equal(got, tensor), name
    assert torch.equal(output.balance_loss, wanted[1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_decode_path_handles_every_dtype_and_equal_logits(monkeypatch, dtype):
    layer = build(dtype, top_k=2)
    layer.gate.weight.data[2:] = layer.gate.weight[:2]  # The lower ID wins if logits are equal.
    (y, output), (expected, _) = both(monkeypatch, layer, tokens(11, dtype))
    assert y.dtype == dtype and (output.routing.expert_ids_TK[:, 0] < 2).all()
    close(y, expected, "y")


@pytest.mark.parametrize("mask", (None, torch.ones(11, dtype=torch.bool)), ids=("", "padding"))
def test_the_decode_path_works_under_autocast(monkeypatch, mask):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (y, _), (expected, _) = both(monkeypatch, build(top_k=2), tokens(11), mask)
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected, "y")


@torch.no_grad()
def test_training_and_dropping_and_zero_or_many_tokens_use_the_general_path():
    layer = build()
    for count, kind in ((0, Routing), (1, DecodeRouting), (MOST_ASSIGNMENTS + 1, Routing)):
        y, output = layer(tokens(count))
        assert type(output.routing) is kind and len(y) == count
    late = {"normalize_gate": "after", "top_k": 2}
    for general in (
        *(build(**options) for options in ({"choice": "experts"}, {"eval_capacity_factor": 1.0}, late)),
        layer.train(),
    ):
        assert type(general(tokens(3))[1].routing) is Routing
    with torch.enable_grad():
        assert type(layer.eval()(tokens(3))[1].routing) is Routing


def test_the_decode_path_computes_a_balance_loss_only_when_it_is_read(monkeypatch):
    layer = MoEFeedForward(CONFIG, Topology(), 1, "decoder.layers.0.fc1").eval()
    calls, made = [], layer_module.balance_losses
    monkeypatch.setattr(layer_module, "balance_losses", lambda *a: calls.append(a) or made(*a))
    layer.begin_call(torch.arange(6).view(3, 2) == 5)
    x = tokens(6).view(2, 3, 6)
    with torch.no_grad():
        layer(x)
    assert not calls
    copies = layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    late = [one.record for one in copies]
    layer.begin_micro_batch()
    layer(x)  # With gradients enabled, the layer computes losses immediately.
    assert len(calls) == 4
    for record in late:
        assert torch.equal(record.balance_loss, layer.record.balance_loss)
        for name, tensor in layer.record.tally._asdict().items():
            assert torch.equal(getattr(record.tally, name), tensor), name
