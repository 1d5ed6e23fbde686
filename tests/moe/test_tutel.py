"""The tests compare `fairseq_tutel.moe_layer`, which has Tutel's arguments, with loops on one rank."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compare import close
from torch import nn
from tutel_case import FFN, TOP, D, E, H, OwnGate, T, build, custom, equals_loop, linear_expert, tokens

import fairseq_tutel as ft
from fairseq_tutel.moe.experts import Experts


@pytest.mark.parametrize(
    ("gate", "options", "loop"),
    [
        ({"k": 1, "capacity_factor": 1.0}, {}, {"top_k": 1, "factor": 1.0}),
        ({"k": 3, "capacity_factor": -0.5}, {}, {"top_k": 3, "factor": -0.5}),
        ({"k": 9}, {}, {"top_k": E}),
        ({"capacity_factor": 0.5}, {"is_postscore": False}, {"factor": 0.5, "prescore": True}),
        ({"capacity_factor": 0.5}, {"batch_prioritized_routing": True}, {"factor": 0.5, "bpr": True}),
        ({}, {"normalize_gate": False}, {"normalize": False}),
        ({}, {"a2a_ffn_overlap_degree": 4, "use_2dh": True}, {}),
        ({}, {"parallel_type": "adaptive:0"}, {}),
        ({}, {"parallel_type": "auto"}, {}),
    ],
    ids=str,
)
def test_a_layer_with_tutels_gate_arguments_equals_a_loop(gate, options, loop):
    layer = build({**TOP, **gate}, **options)
    equals_loop(layer, **{"top_k": 2, **loop})
    equals_loop(layer.eval(), **{"top_k": 2, **loop})


def test_the_default_options_equal_the_default_options_of_tutel():
    layer = build({"type": "top"}, {"type": "ffn", "hidden_size_per_expert": H})
    (config,) = layer.moe.gate_configs
    assert (config.top_k, config.capacity_factor, config.gate_fp32, config.gate_noise) == (1, 1.0, False, 0)
    assert layer.num_global_experts == 1 and type(layer.experts) is Experts


def test_the_load_importance_loss_equals_the_formula_of_tutel():
    layer, x = build({**TOP, "gate_noise": 1.0}, is_gshard_loss=False), tokens(T)
    logits_TE = x @ layer.gates[0].weight.t()
    torch.manual_seed(3)
    noisy_TE = logits_TE + torch.randn_like(logits_TE) / E
    torch.manual_seed(3)
    got = layer(x).l_aux
    probs_TE = torch.softmax(logits_TE, dim=1)
    kth_T1 = noisy_TE.sort(dim=1, descending=True).values[:, 1:2]
    load_TE = torch.distributions.Normal(0.0, 1.0 / E).cdf(probs_TE - kth_T1)
    parts = [total.var() / (total.mean() ** 2 + 1e-10) for total in (probs_TE.sum(0), load_TE.sum(0))]
    close(got, sum(parts) / 2, "l_aux")


def test_several_gates_use_the_same_experts():
    gates = [
        {**TOP, "k": 1},
        {"type": "cosine_top", "k": 3, "capacity_factor": 0.5, "proj_dim": 5, "init_t": 0.25},
        {"type": "custom", "module": OwnGate, "scale": 3.0, "top_k": 2, "capacity_factor": 0.5},
        {**TOP, "fp32_gate": True},
    ]
    layer = build(gates)
    equals_loop(layer, 1)

    def cosine(x):
        g = layer.gates[1]
        projected = F.normalize(x @ g.projection_weight.t() + g.projection_bias, dim=1)
        return g.log_scale.exp() * projected @ F.normalize(g.directions, dim=1).t()

    assert layer.gates[1].directions.shape == (E, 5)
    equals_loop(layer, 3, 0.5, call={"gate_index": 1}, gate=cosine)
    assert layer.gates[2].rest == {"capacity_factor": 0.5}
    equals_loop(layer, 2, 0.5, call={"gate_index": 2}, gate=layer.gates[2])
    assert [config.gate_fp32 for config in layer.moe.gate_configs] == [False, False, False, True]


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"activation_fn": None}, F.relu),
        ({"activation_fn": F.relu_, "count_per_node": E}, F.relu),
        ({"activation_fn": torch.sin, "has_fc1_bias": False}, torch.sin),
        ({"has_fc2_bias": False}, F.relu),
        ({"has_fc1_bias": False, "has_fc2_bias": 0}, F.relu),
    ],
    ids=("default", "relu in place", "sin", "without bias", "without biases"),
)
def test_ffn_experts_equal_a_computation_by_loops(options, activation):
    for prescore in (False, True):
        layer = build(experts={**FFN, **options}, is_postscore=not prescore)
        own = layer.experts.expert_parameters()
        for name in ("fc1_bias", "fc2_bias"):
            assert (name in own) == options.get(f"has_{name}", True)
        equals_loop(layer, 2, expert=lambda *a: linear_expert(*a, activation), prescore=prescore)


@pytest.mark.parametrize("activation", (None, torch.sigmoid))
def test_llama_ffn_experts_equal_a_computation_by_loops(activation):
    options = {} if activation is None else {"activation_fn": activation}
    layer = build(experts={**FFN, "type": "llama_ffn", **options})
    own = layer.experts.expert_parameters()
    stds = torch.stack([p.std() for p in own.values()])
    assert ((stds > 0.008) & (stds < 0.012)).all()

    def expert(layer, e, x):
        gated = (activation or F.silu)(own["fc1_weight"][e] @ x)
        return own["fc2_weight"][e] @ (gated * (own["fc3_weight"][e] @ x))

    equals_loop(layer, 2, expert=expert)


@pytest.mark.parametrize("out", (None, 3))
def test_custom_experts_equal_a_computation_by_loops(out):
    layer = build(experts=custom(out=out, power=2))
    equals_loop(layer, 2, expert=lambda layer, e, x: (x @ layer.experts.W[e]) ** 2)
    assert layer(tokens(2, 3)).shape == (2, 3, out or D)
    (module,) = layer.experts._module
    shape, ctx = module.seen[0]
    assert shape[0] == E and shape[2] == D
    assert (ctx.num_global_experts, ctx.num_local_experts, ctx.sharded_count, ctx.model_dim) == (E, E, 1, D)
    assert int(layer.experts.calls) == len(module.seen)
    layer.eval()(tokens(T))
    assert not module.training


def test_custom_weights_without_the_number_of_experts_as_dimension_0_raise_an_error():
    def module(model_dim, num_experts_per_device, sharded_count):
        return nn.Linear(model_dim, model_dim)

    with pytest.raises(ValueError, match=r"weight of shape \(6, 6\); its dimension 0 must be 4,"):
        build(experts={"type": "custom", "module": module, "num_experts_per_device": E})


def test_arguments_of_forward_override_constructor_options():
    layer = build({**TOP, "k": 1, "capacity_factor": 0.5})
    equals_loop(layer, 1, 0.0, call={"capacity_factor": 0})  # The argument 0 overrides 0.5.
    equals_loop(layer, 2, -1.0, call={"top_k": 2, "capacity_factor": -1.0, "inequivalent_tokens": True})
    equals_loop(layer, E, 0.5, call={"top_k": 9})
    equals_loop(layer, 1, 0.5, call={"a2a_ffn_overlap_degree": 3, "adaptive_r": 0})
    assert layer.moe.strategy == ft.Strategy(overlap=3, adaptive_r=0)
    layer(tokens(T), adaptive_r=7)
    assert layer.moe.strategy == ft.Strategy(overlap=3, adaptive_r=1)


@pytest.mark.parametrize("experts", (FFN, {**FFN, "has_fc2_bias": False}, custom()), ids=str)
def test_scan_expert_func_and_result_func_and_get_parameter_iterator_work_as_in_tutel(experts):
    seen = []
    layer = build(
        experts=experts,
        scan_expert_func=lambda name, p: seen.append((name, p)),
        result_func=lambda y: (y, y.l_aux),
    )
    own = layer.experts.expert_parameters()
    assert dict(seen) == own == dict(layer.get_parameter_iterator("local_experts")) and len(seen) == len(
        own
    )
    assert [p for _, p in layer.get_parameter_iterator("gate")] == [layer.gates[0].weight]
    y, loss = layer(tokens(T))
    assert loss is y.l_aux and loss.requires_grad


def test_the_first_seed_initializes_the_layer_and_the_third_seed_sets_the_global_generator():
    same = [
        build({"type": "custom", "module": OwnGate}, custom(), seeds=seeds) for seeds in ((1,), (1, 9, 12))
    ]
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(12)))
    assert all(map(torch.equal, *(layer.parameters() for layer in same)))
    other = build(seeds=(5,))
    assert not torch.equal(other.experts.fc1_weight, build().experts.fc1_weight)
    assert not torch.equal(other.gates[0].weight, build().gates[0].weight)
    expected = torch.get_rng_state()
    build({"type": "custom", "module": OwnGate}, custom(), seeds=(1, 2))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_output_has_the_dtype_of_the_input(dtype):
    layer, x = build().float(), tokens(T)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    close(y, build()(x), "output", 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.float32


BAD = [
    ({"gate_type": {"type": "top", "kk": 2}}, "kk"),
    ({"gate_type": "Top2Gate"}, "Top2Gate"),
    ({"gate_type": {"type": "top", "k": 0}}, "top_k .* is 0"),
    ({"experts": {"type": "fnn"}}, "fnn"),
    ({"experts": {"type": "ffn"}}, "hidden_dim"),
    ({"experts": {**FFN, "dropout": 1}}, "dropout"),
    ({"experts": {**FFN, "num_experts_per_device": -2}}, "num_experts_per_device is -2"),
    ({"is_gshard_loss": False}, "gate noise"),
    ({"a2a_ffn_overlap_degree": 0}, "overlap is 0"),
    ({"parallel_type": "adaptive"}, "parallel_type is 'adaptive'"),
]


@pytest.mark.parametrize(("options", "value"), BAD, ids=str)
def test_invalid_tutel_arguments_raise_an_error(options, value):
    with pytest.raises(ValueError, match=value):
        ft.moe_layer(**{"gate_type": TOP, "model_dim": D, "experts": FFN, **options})


def test_the_first_example_of_docs_tutel_runs():
    text = (Path(__file__).parents[2] / "docs" / "tutel.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    names = {}
    exec(example, names)
    assert names["y"].shape == (8, 16, 64) and names["layer"].experts.fc1_weight.grad.any()
