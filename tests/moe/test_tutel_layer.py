"""`fairseq_tutel.moe_layer`, Tutel's constructor: gates and experts against loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compare import close
from torch import nn
from tutel_case import FFN, TOP, D, E, H, OwnGate, T, build, custom, equals_loop, linear_expert, tokens

from fairseq_tutel.moe.experts import Experts


@pytest.mark.parametrize("top_k", (1, 2, 3))
@pytest.mark.parametrize("factor", (0.0, 0.5, 1.0, -0.5))
def test_k_and_capacity_factor(top_k, factor):
    layer = build({"type": "top", "k": top_k, "capacity_factor": factor})
    equals_loop(layer, top_k, factor)
    equals_loop(layer.eval(), top_k, factor)


def test_tutels_defaults():
    layer = build({"type": "top"}, {"type": "ffn", "hidden_size_per_expert": H})
    (config,) = layer.moe.gate_configs
    assert (config.top_k, config.capacity_factor, config.gate_fp32, config.gate_noise) == (1, 1.0, False, 0)
    assert layer.num_global_experts == 1
    assert type(layer.experts) is Experts
    assert set(layer.experts.expert_parameters()) == {"fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"}


def test_a_k_above_the_experts_is_taken_for_all_of_them():
    equals_loop(build({**TOP, "k": 9}), E)
    equals_loop(build(), E, call={"top_k": 9})


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"is_postscore": False}, {"prescore": True}),
        ({"batch_prioritized_routing": True}, {"bpr": True}),
        ({"normalize_gate": False}, {"normalize": False}),
    ],
    ids=str,
)
def test_what_is_done_with_the_weights(options, how):
    layer = build({**TOP, "capacity_factor": 0.5}, **options)
    equals_loop(layer, 2, 0.5, **how)
    x = tokens(T)
    assert not torch.allclose(layer(x), build({**TOP, "capacity_factor": 0.5})(x))


def test_batch_prioritized_routing_drops_nothing_where_nothing_is_to_be_dropped():
    equals_loop(build(batch_prioritized_routing=True), 2)


def test_the_gshard_loss():
    x, layer = tokens(T), build()
    probs_TE = torch.softmax(x @ layer.gates[0].weight.t(), dim=1)
    share_E = torch.bincount(probs_TE.argmax(dim=1), minlength=E).double() / T
    close(layer(x).l_aux, E * (share_E * probs_TE.mean(dim=0)).sum(), "l_aux")


def test_the_load_and_importance_loss_is_tutels():
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


def test_gate_noise_is_of_training_alone():
    layer, x = build({**TOP, "gate_noise": 5.0}), tokens(T)
    assert not torch.equal(layer(x), layer(x))
    equals_loop(layer.eval(), 2)


@pytest.mark.parametrize("fp32", (False, True, 0, 1))
def test_fp32_gate_computes_in_fp32_and_leaves_its_parameters(fp32):
    layer, seen = build({**TOP, "fp32_gate": fp32}).bfloat16(), []
    layer.gates[0].register_forward_hook(lambda module, given, logits: seen.append(logits.dtype))
    y = layer(tokens(T).bfloat16())
    assert seen == [torch.float32 if fp32 else torch.bfloat16]
    assert layer.gates[0].weight.dtype == y.dtype == torch.bfloat16


def test_several_gates_on_the_same_experts():
    gates = [
        {**TOP, "k": 1},
        {"type": "cosine_top", "k": 3, "capacity_factor": 0.5, "proj_dim": 5, "init_t": 0.25},
        {**TOP, "gate_noise": 1.0, "fp32_gate": True},
    ]
    layer = build(gates)
    equals_loop(layer, 1)

    def cosine(x):
        g = layer.gates[1]
        projected = F.normalize(x @ g.projection_weight.t() + g.projection_bias, dim=1)
        return g.log_scale.exp() * projected @ F.normalize(g.directions, dim=1).t()

    assert layer.gates[1].directions.shape == (E, 5)
    assert layer.gates[1].log_scale.exp().item() == pytest.approx(1 / 0.25)
    equals_loop(layer, 3, 0.5, call={"gate_index": 1}, gate=cosine)
    noises = [config.gate_noise for config in layer.moe.gate_configs]
    assert noises == [0.0, 0.0, 1.0]
    assert [config.gate_fp32 for config in layer.moe.gate_configs] == [False, False, True]
    assert not torch.equal(layer.gates[0].weight, layer.gates[2].weight)
    with pytest.raises(ValueError, match="gate_index is 3 but there are 3 gates"):
        layer(tokens(T), gate_index=3)


def test_a_custom_gate():
    gate = {"type": "custom", "module": OwnGate, "scale": 3.0, "top_k": 2, "capacity_factor": 0.5}
    layer = build(gate)
    own = layer.gates[0]
    assert own.scale == 3.0 and own.rest == {"capacity_factor": 0.5}
    equals_loop(layer, 2, 0.5, gate=own)
    one = build({"type": "custom", "module": OwnGate})
    equals_loop(one, 1, 1.0, gate=one.gates[0])
    again, other = (build(gate, seeds=(s, 2)).gates[0].map.weight for s in (1, 5))
    assert torch.equal(again, own.map.weight) and not torch.equal(other, own.map.weight)


def test_a_custom_gate_that_gives_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"gave logits of shape \(11, 1\) for 11 tokens and 4 experts"):
        build({"type": "custom", "module": lambda model_dim, num_global_experts: nn.Linear(model_dim, 1)})


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, F.relu),
        ({"activation_fn": None}, F.relu),
        ({"activation_fn": lambda x: F.gelu(x) ** 2}, lambda x: F.gelu(x) ** 2),
        ({"activation_fn": F.relu_}, F.relu),
        ({"activation_fn_with_self": lambda x, own: torch.tanh(x) * own.num_local}, lambda x: 4 * x.tanh()),
        ({"has_fc1_bias": 0}, F.relu),
        ({"has_fc2_bias": False}, F.relu),
        ({"has_fc1_bias": False, "has_fc2_bias": False}, F.relu),
        ({"output_dim": 3}, F.relu),
        ({"output_dim": 9, "activation_fn": torch.sin, "has_fc1_bias": False}, torch.sin),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_the_options_of_ffn(options, activation):
    for more in ({}, {"is_postscore": False}):
        layer = build(experts={**FFN, **options}, **more)
        own = layer.experts.expert_parameters()
        for name in ("fc1", "fc2"):
            assert (f"{name}_bias" in own) == options.get(f"has_{name}_bias", True)
            assert all(p.abs().sum() > 0 and p.isfinite().all() for p in own.values())
        equals_loop(
            layer, 2, expert=lambda *a: linear_expert(*a, activation), prescore="is_postscore" in more
        )
        shape = layer(tokens(2, 3)).shape
        assert shape == (2, 3, options.get("output_dim", D))
        assert layer(tokens(0, 3)).shape == (0, 3, options.get("output_dim", D))


@pytest.mark.parametrize("activation", (None, torch.sigmoid))
def test_llama_ffn(activation):
    options = {} if activation is None else {"activation_fn": activation}
    layer = build(
        experts={"type": "llama_ffn", "num_experts_per_device": E, "hidden_size_per_expert": H} | options
    )
    own = layer.experts.expert_parameters()
    assert set(own) == {"fc1_weight", "fc2_weight", "fc3_weight"}
    stds = torch.stack([p.std() for p in own.values()])
    assert ((stds > 0.008) & (stds < 0.012)).all()

    def expert(layer, e, x):
        gated = (activation or F.silu)(own["fc1_weight"][e] @ x)
        return own["fc2_weight"][e] @ (gated * (own["fc3_weight"][e] @ x))

    equals_loop(layer, 2, expert=expert)


@pytest.mark.parametrize("out", (None, 3))
def test_custom_experts(out):
    layer = build(experts=custom(out=out, power=2))
    equals_loop(layer, 2, expert=lambda layer, e, x: (x @ layer.experts.W[e]) ** 2)
    assert layer(tokens(0)).shape == (0, out or D)
    (module,) = layer.experts._module
    shape, ctx = module.seen[0]
    assert shape[0] == E and shape[2] == D
    assert (ctx.num_global_experts, ctx.num_local_experts, ctx.sharded_count, ctx.model_dim) == (E, E, 1, D)
    assert int(layer.experts.calls) == len(module.seen)
    layer.eval()(tokens(T))
    assert not module.training


def test_custom_experts_are_saved_copied_and_drawn_by_seed():
    layer = build(experts=custom())
    assert set(layer.state_dict()) == {"moe.gate.weight", "moe.experts.W", "moe.experts.calls"}
    other = build(experts=custom(), seeds=(7, 8))
    assert not torch.equal(layer(tokens(T)), other(tokens(T)))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(tokens(T)), other(tokens(T)))
    assert torch.equal(layer(tokens(T)), copy.deepcopy(layer)(tokens(T)))
    assert torch.equal(layer(tokens(T)), build(experts=custom())(tokens(T)))


def test_custom_experts_see_reserved_dimensions_and_may_change_them():
    x = tokens(5, 2, features=3)
    layer = build(experts=custom())
    y = layer(x, reserve_dims=2)
    assert y.shape == x.shape and torch.equal(y.flatten(1), layer(x.flatten(1)))
    assert layer.experts._module[0].seen[-2][0][2:] == (2, 3)
    wider = build(experts=custom(out=10))
    assert wider(x, reserve_dims=2).shape == (5, 2, 5)
    assert wider(x.flatten(1)).shape == (5, 10)


def test_reserved_dimensions_of_built_in_experts():
    x, layer = tokens(5, 2, features=3), build()
    assert torch.equal(layer(x, reserve_dims=2), layer(x.flatten(1)).view(x.shape))
    assert layer(tokens(D)[0], reserve_dims=1).shape == (D,)


def test_custom_experts_without_experts_on_dimension_0_are_refused():
    def module(model_dim, num_experts_per_device, sharded_count):
        return nn.Linear(model_dim, model_dim)

    with pytest.raises(ValueError, match=r"weight of shape \(6, 6\); its dimension 0 must be 4,"):
        build(experts={"type": "custom", "module": module, "num_experts_per_device": E})
