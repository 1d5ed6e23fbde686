"""`fairseq_tutel.moe_layer`, except its numbers: construction and the arguments of one call."""

import gc
import logging
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from compare import close
from torch import nn
from tutel_case import FFN, TOP, D, E, H, OwnGate, T, build, custom, equals_loop, tokens

import fairseq_tutel as ft
from fairseq_tutel.moe import tutel_arguments as arguments
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.tutel_arguments import tutel_capacity


@pytest.mark.parametrize("count", ({"count_per_node": 3}, {"num_experts_per_device": -1}, {}))
def test_how_many_experts(count):
    layer = build(experts={"type": "ffn", "hidden_size_per_expert": H, **count})
    assert layer.num_global_experts == layer.experts.num_local == count.get("count_per_node", 1)


def test_what_tutels_examples_ask_the_layer():
    layer = build()
    assert ft.moe_layer.global_expert_count(3) == 3
    assert dict(layer.get_parameter_iterator("local_experts")) == layer.experts.expert_parameters()
    assert [p for _, p in layer.get_parameter_iterator("gate")] == [layer.gates[0].weight]
    with pytest.raises(ValueError, match="param_type is 'all'; choose gate or local_experts"):
        layer.get_parameter_iterator("all")


@pytest.mark.parametrize(
    "experts", (FFN, {**FFN, "has_fc2_bias": False}, custom()), ids=("ffn", "own", "custom")
)
def test_scan_expert_func_sees_every_expert_parameter_once(experts):
    seen = []
    layer = build(experts=experts, scan_expert_func=lambda name, p: seen.append((name, p)))
    assert dict(seen) == layer.experts.expert_parameters() == dict(layer.experts.named_parameters())
    assert len(seen) == len(dict(seen))


def test_result_func():
    y, loss = build(result_func=lambda y: (y, y.l_aux))(tokens(T))
    assert torch.equal(loss, y.l_aux) and loss.requires_grad


def test_seeds():
    one, gate, experts = build(seeds=(1, 2)), build(seeds=(5, 2)), build(seeds=(1, 5))
    assert not torch.equal(one.gates[0].weight, gate.gates[0].weight)
    assert torch.equal(one.experts.fc1_weight, gate.experts.fc1_weight)
    assert torch.equal(one.gates[0].weight, experts.gates[0].weight)
    assert not torch.equal(one.experts.fc1_weight, experts.experts.fc1_weight)
    assert not torch.equal(one.experts.fc1_weight[0], one.experts.fc1_weight[1])


def test_the_third_seed_is_left_in_the_generator_and_the_others_are_not():
    torch.manual_seed(11)
    expected = torch.get_rng_state()
    build(seeds=(1, 2), experts=custom(), gate={"type": "custom", "module": OwnGate})
    assert torch.equal(torch.get_rng_state(), expected)
    build(seeds=(1, 2, None))
    assert torch.equal(torch.get_rng_state(), expected)
    build(seeds=(1, 2, 12))
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(12)))


def test_without_seeds_it_is_drawn_as_moe_layer_is():
    torch.manual_seed(4)
    layer = build({**TOP, "k": 2}, seeds=None)
    torch.manual_seed(4)
    plain = MoELayer(ft.MoEConfig(model_dim=D, hidden_dim=H, num_experts=E)).double()
    assert torch.equal(layer.gates[0].weight, plain.gate.weight)
    assert torch.equal(layer.experts.fc2_weight, plain.experts.fc2_weight)


def test_what_is_given_to_a_call_holds_for_that_call():
    layer = build({**TOP, "k": 1, "capacity_factor": 0.5})
    equals_loop(layer, 1, 0.0, call={"capacity_factor": 0})  # 0 is a value, not "not given"
    equals_loop(layer, 3, 0.5, call={"top_k": 3})
    equals_loop(layer, 2, -1.0, call={"top_k": 2, "capacity_factor": -1.0})
    equals_loop(layer, 1, 0.5)


SET_LATER = [
    ("is_postscore", 0, {"prescore": True}),
    ("normalize_gate", 0, {"normalize": False}),
    ("batch_prioritized_routing", 1, {"bpr": True}),
    ("top_k", 1, {"top_k": 1}),
    ("top_k", 9, {"top_k": E}),
    ("capacity_factor", 0.25, {"factor": 0.25}),
    ("capacity_factor", 0, {"factor": 0}),
]


@pytest.mark.parametrize("custom_one", (False, True))
@pytest.mark.parametrize(("name", "value", "how"), SET_LATER, ids=str)
def test_what_is_set_between_two_calls_holds_from_then_on(name, value, how, custom_one):
    kind = {"type": "custom", "module": OwnGate} if custom_one else {}
    layer = build({**TOP, "k": 2, "capacity_factor": 0.5, **kind})
    owner = layer if hasattr(layer, name) else layer.gates[0]
    before = getattr(owner, name)
    own = {"gate": layer.gates[0]} if custom_one else {}
    for given in (value, before, value):
        setattr(owner, name, given)
        equals_loop(layer, **{"top_k": 2, "factor": 0.5, **own, **(how if given is value else {})})
    equals_loop(layer, **{"factor": 0.5, **own, **how, "top_k": 3}, call={"top_k": 3})


def test_a_gate_s_noise_and_the_loss_may_be_set_and_of_several_gates_each_its_own():
    layer, x = build([TOP, {**TOP, "k": 1}]), tokens(T)
    layer.gates[1].gate_noise = 2.0
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer(x, gate_index=1), layer(x, gate_index=1))
    layer.gates[1].top_k = 3
    layer.eval()
    close(layer(x, gate_index=1), layer(x, gate_index=1, top_k=3), "output")
    equals_loop(layer, 2)
    layer.gates[0].gate_noise = 2.0
    layer.is_gshard_loss = False
    expected = build([{**TOP, "gate_noise": 2.0}] * 2, is_gshard_loss=False).eval()
    close(layer(x).l_aux, expected(x).l_aux, "l_aux")


def test_fp32_gate_may_be_set():
    layer, seen = build({**TOP, "fp32_gate": 0}).bfloat16(), []
    layer.gates[0].register_forward_hook(lambda module, given, logits: seen.append(logits.dtype))
    layer.gates[0].fp32_gate = True
    layer(tokens(T).bfloat16())
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_k", 0, r"gates\[0\].top_k is 0; give a whole number, at least 1"),
        ("capacity_factor", "1", r"gates\[0\].capacity_factor is '1'; give a finite number"),
        ("gate_noise", -1, r"gates\[0\].gate_noise is -1; give a finite number, at least 0"),
        ("is_postscore", "no", "is_postscore is 'no'; give True or False"),
        ("is_gshard_loss", False, "is_gshard_loss is False, but gate 0 has no gate_noise"),
        ("adaptive_degree", "2", "adaptive_r is '2'; give a whole number"),
        ("a2a_ffn_overlap_degree", 0, "a2a_ffn_overlap_degree is 0; give"),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_sentence(name, value, message):
    layer = build()
    with pytest.raises(ValueError, match=message) as error:
        setattr(layer if hasattr(layer, name) else layer.gates[0], name, value)
        layer(tokens(T))
    assert str(error.value).endswith(".") and "--" not in str(error.value)


def test_the_numbers_that_tutels_layer_shows():
    layer = build(a2a_ffn_overlap_degree=2, parallel_type="adaptive:0")
    assert layer.num_local_experts == layer.num_global_experts == E
    assert (layer.sharded_count, layer.valid_rs) == (1, [0, 1])
    assert (layer.a2a_ffn_overlap_degree, layer.adaptive_degree) == (2, 0)
    layer.a2a_ffn_overlap_degree, layer.adaptive_degree = 3, 1
    assert layer.moe.strategy == ft.How(overlap=3, adaptive_r=1)
    gate = layer.gates[0]
    assert (gate.top_k, gate.capacity_factor, gate.gate_noise) == (2, 0.0, 0.0)
    for r in layer.valid_rs:
        close(layer(tokens(T), adaptive_r=r), build()(tokens(T)), "output")


def test_an_activation_finds_tutels_names_on_the_experts():
    names = ("model_dim", "hidden_size", "hidden_size_per_expert", "output_dim")
    more = ("num_experts_per_device", "sharded_count")
    seen = []

    def activation(x, own):
        seen.append([getattr(own, name) for name in names + more])
        return torch.tanh(x)

    build(experts={**FFN, "activation_fn_with_self": activation, "output_dim": 3})
    assert seen == [[D, H, H, 3, E, 1]]


def test_our_capacity_and_where_tutels_is_another():
    # T = 11, E = 4: ours k * ceil(1.25 * 11 / 4), Tutel's k * int(1.25 * ceil(11 / 4)) = 3.
    layer = build({**TOP, "k": 1, "capacity_factor": 1.25})
    nn.init.zeros_(layer.gates[0].weight)  # all tokens to expert 0
    kept = layer(tokens(T)).abs().sum(dim=1) > 0
    assert kept.tolist() == [True] * 4 + [False] * 7
    # Tutel fails with its k * int(0.1 * 3) = 0 slots; here there is one.
    assert (layer(tokens(T), capacity_factor=0.1).abs().sum(dim=1) > 0).tolist() == [True] + [False] * 10


@pytest.mark.parametrize("bpr", (False, True))
@pytest.mark.parametrize(
    ("k", "factor", "overlap", "slots"),
    [
        # T = 11 tokens on E = 4 experts: int(f * 3) for each choice, up to a multiple of the chunks.
        (1, 1.25, 1, 3),
        (2, 0.5, 1, 2),
        (3, -0.9, 1, 6),
        (1, 1.0, 2, 4),
        (2, 0.5, 3, 3),
        (2, 0, 2, 2 * T),
    ],
)
def test_tutels_capacity_where_it_is_asked_for(k, factor, overlap, slots, bpr):
    gate = {**TOP, "k": k, "capacity_factor": factor}
    options = {"tutel_capacity": True, "batch_prioritized_routing": bpr}
    equals_loop(build(gate, a2a_ffn_overlap_degree=overlap, **options), k, limit=slots, bpr=bpr)
    layer = build({**TOP, "k": 4, "capacity_factor": 9.0}, **options)
    call = {"top_k": k, "capacity_factor": factor, "a2a_ffn_overlap_degree": overlap}
    equals_loop(layer.eval(), k, limit=slots, bpr=bpr, call=call)
    layer.tutel_capacity = False
    ours = k * math.ceil(abs(factor) * T / E) if factor else 2 * T
    equals_loop(layer, k, limit=ours, bpr=bpr, call=call)


def test_a_capacity_that_is_none_is_refused_where_tutel_stops():
    layer = build(tutel_capacity=True)
    with pytest.raises(ValueError, match=r"factor is 0\.1, which with tutel_capacity gives 0"):
        layer(tokens(T), capacity_factor=0.1)
    assert layer(tokens(0), capacity_factor=0.1).shape == (0, D)


def test_a_large_multiple_is_a_multiple_of_128():
    assert tutel_capacity(1.0, 1, 2, 10, 256).fixed == 256
    assert tutel_capacity(1.0, 1, 2, 10, 257).fixed == 384


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("experts", (FFN, custom()), ids=("ffn", "custom"))
def test_no_tokens(shape, experts):
    for gate in (TOP, {**TOP, "capacity_factor": 1.0}):
        layer = build(gate, experts)
        layer.zero_grad()
        x = tokens(*shape)
        y = layer(x)
        assert y.shape == x.shape
        (y.sum() + y.l_aux).backward()
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_y_has_the_inputs_dtype(dtype):
    layer, x = build().float(), tokens(T)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    close(y, build()(x), "output", 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.float32


def test_the_loss_hangs_on_y_alone():
    layer = build()
    y = layer(tokens(T))
    loss = weakref.ref(y.l_aux)
    del y
    gc.collect()
    assert loss() is None
    assert not hasattr(layer, "l_aux")


NO_EFFECT = [
    ({"use_2dh": True}, {}),  # on one node
    ({"pad_samples": False}, {}),
    ({}, {"inequivalent_tokens": True}),
    ({}, {"megablocks_size": 128}),
]
HOW = [
    ({"a2a_ffn_overlap_degree": 4}, {}),
    ({"parallel_type": "adaptive:0"}, {}),
    ({}, {"a2a_ffn_overlap_degree": 2}),
    ({}, {"adaptive_r": 0}),
]


@pytest.mark.parametrize(("options", "call"), HOW, ids=str)
def test_how_it_is_computed_changes_nothing_and_holds_for_one_call(options, call):
    plain, x = build(), tokens(T)
    layer = build(**options)
    before = layer.moe.strategy
    y = layer(x, **call)
    assert torch.equal(y, plain(x)) and torch.equal(y.l_aux, plain(x).l_aux)
    assert layer.moe.strategy == before


@pytest.mark.parametrize(("options", "call"), NO_EFFECT, ids=str)
def test_what_has_no_effect_is_said_once(options, call, caplog):
    arguments.log_no_effect.cache_clear()
    plain, x = build(), tokens(T)
    ((name, _),) = {**options, **call}.items()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = build(**options)(x, **call)
            assert torch.equal(y, plain(x)) and torch.equal(y.l_aux, plain(x).l_aux)
    assert [record.message.split()[0] for record in caplog.records] == [name]
    assert "no effect" in caplog.text and caplog.records[0].name == "fairseq_tutel.moe.tutel_arguments"


def test_defaults_and_what_comes_to_the_same_are_not_worth_a_word(caplog):
    arguments.log_no_effect.cache_clear()
    with caplog.at_level(logging.WARNING):
        for parallel_type in ("adaptive:1", "adaptive:7", "data", "model", "auto"):
            build(parallel_type=parallel_type, a2a_ffn_overlap_degree=1, use_2dh=False)(
                tokens(T), adaptive_r=1, a2a_ffn_overlap_degree=1, megablocks_size=0
            )
    assert not caplog.records


def test_the_example_of_the_documentation_runs():
    text = (Path(__file__).parents[2] / "docs" / "tutel.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    names = {}
    exec(example, names)
    assert names["y"].shape == (8, 16, 64) and names["layer"].experts.fc1_weight.grad.any()
