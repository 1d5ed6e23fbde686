"""The tests run layers with custom gates, custom experts, and several gates for the same experts."""

import copy
import dataclasses

import pytest
import torch
from compare import close, gradients, same_function
from custom_parts import CalmGate, DeepExpert
from normal import normal
from torch import Tensor, nn
from torch.func import functional_call

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.experts import CustomExperts
from fairseq_tutel.parallel.groups import Topology

CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=4, activation="gelu")
OWN = dataclasses.replace(CONFIG, gate_type="custom_parts.CalmGate", expert_type="custom_parts.DeepExpert")
T = 11


def tokens(*shape: int) -> Tensor:
    return normal(*shape, CONFIG.model_dim, seed=6).requires_grad_()


def groups(*counts: int) -> Groups:
    return Groups.of_host(counts, torch.device("cpu"))


def own_layer(seed: int = 1, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(OWN, **options), seed=seed).double()


def of_expert(layer: MoELayer, e: int) -> dict[str, Tensor]:
    """Return the parameters of expert e under the names that the expert's class gives them."""
    stacks = layer.experts.expert_parameters()
    return {name.replace("__", "."): stack[e] for name, stack in stacks.items()}


def by_loop(layer: MoELayer, x_TD: Tensor, real: list[bool]) -> Tensor:
    """Compute the layer token by token with direct calls of the custom gate and expert classes."""
    expert = DeepExpert(layer.config).double().eval()
    scores_TE = torch.softmax(2 * torch.tanh(x_TD @ layer.gate.weight.t() + layer.gate.bias), 1)
    y = []
    for t, x_D in enumerate(x_TD):
        row = scores_TE[t].tolist()
        best = sorted(range(4), key=row.__getitem__, reverse=True)[: layer.config.top_k]
        total = scores_TE[t][best].sum() if len(best) > 1 else 1.0
        y.append(0 * x_D)
        for e in best if real[t] else []:
            out = functional_call(expert, of_expert(layer, e), (x_D[None],))[0]
            y[t] = y[t] + scores_TE[t, e] / total * out
    return torch.stack(y)


@pytest.mark.parametrize("top_k", (1, 2, 4))
@pytest.mark.parametrize("padded", (False, True))
def test_a_layer_with_a_custom_gate_and_custom_experts_equals_a_loop(top_k, padded):
    layer, x = own_layer(top_k=top_k), tokens(T)
    assert type(layer.gate) is CalmGate and isinstance(layer.experts, CustomExperts)
    mask = torch.arange(T) % 4 == 1 if padded else torch.zeros(T, dtype=torch.bool)
    named = {"x": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad}}
    assert {"gate.bias", "experts.body__0__weight", "experts.scale"} < set(named)
    same_function(lambda: layer(x, mask)[0], lambda: by_loop(layer, x, (~mask).tolist()), named)


def with_parts(config: MoEConfig, gate: nn.Module, layer: MoELayer) -> MoELayer:
    """Return a new layer with this configuration, the parameters of `gate` and the experts of `layer`."""
    parts = {"gates": [copy.deepcopy(gate)], "experts": copy.deepcopy(layer.experts)}
    other = MoELayer(config, seed=1, **parts).double()
    other.gate.load_state_dict(gate.state_dict())
    other.experts.load_state_dict(layer.experts.state_dict())
    return other


@pytest.mark.parametrize("num_tokens", (0, 3))
def test_custom_experts_without_rows_have_zero_gradients_for_every_parameter(num_tokens):
    layer, x = own_layer(), tokens(num_tokens)
    y, output = layer(x, torch.ones(num_tokens, dtype=torch.bool))
    (y.sum() + output.balance_loss).backward()
    for name, tensor in (("x", x), *layer.named_parameters()):
        if tensor.requires_grad:
            assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("rank", (0, 1))
def test_initial_values_of_custom_experts_depend_on_the_seed_but_not_on_the_number_of_ranks(rank):
    split_over = Topology(world_size=2, rank=rank, expert_parallel_size=2)
    torch.manual_seed(rank)  # The global random generators of ranks may differ.
    options = {"shared_experts": 1, "residual": True}
    config = dataclasses.replace(OWN, **options)
    split, whole = MoELayer(config, split_over, seed=1), MoELayer(config, seed=1)
    other = MoELayer(config, seed=2)
    mine = slice(2 * rank, 2 * rank + 2)
    for name, tensor in whole.named_parameters():
        is_expert = name.startswith("experts.")
        got = dict(split.named_parameters())[name]
        assert torch.equal(got, tensor[mine] if is_expert else tensor), name
        if tensor.requires_grad:
            assert not torch.equal(dict(other.named_parameters())[name], tensor), name
        if is_expert and tensor.requires_grad:  # All experts differ from each other.
            assert len(set(map(str, tensor.tolist()))) == 4
            assert got.expert  # The parameter is marked as an expert parameter.


@pytest.mark.parametrize("rank", (0, 1))
def test_each_rank_loads_its_experts_from_a_state_dict_with_all_experts(rank):
    whole = MoELayer(OWN, seed=1)
    topology = Topology(world_size=2, rank=rank, expert_parallel_size=2)
    split = MoELayer(OWN, topology, seed=2)
    state = whole.state_dict()
    assert state["experts.body__0__weight"].shape == (4, 6, 5)
    split.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    for name, stack in split.experts.expert_parameters().items():
        assert torch.equal(stack, state[f"experts.{name}"][2 * rank : 2 * rank + 2]), name
    again = MoELayer(OWN, seed=3)
    again.load_state_dict(state)
    assert torch.equal(again.eval()(tokens(T).float())[0], whole.eval()(tokens(T).float())[0])
    with pytest.raises(ValueError, match=r"experts.scale has shape \(2,\) but this model needs \(4,"):
        again.load_state_dict({**state, "experts.scale": torch.zeros(2)})


@pytest.mark.parametrize("option", ("shared_experts", "residual"))
def test_custom_experts_can_be_shared_experts_or_residual_experts(option):
    layer = own_layer(**{option: 2 if option == "shared_experts" else True})
    part = layer.beside.shared if option == "shared_experts" else layer.beside.dense
    assert [type(expert) for expert in part.parts] == [DeepExpert] * len(part.parts)
    assert len(part.parts) == (2 if option == "shared_experts" else 1)
    first, last = part.parts[0].body[0].weight, part.parts[-1].body[0].weight
    assert torch.equal(first, last) == (option == "residual")
    plain = own_layer()
    x = tokens(T)
    difference = layer.eval()(x)[0] - plain.eval()(x)[0]
    if option == "shared_experts":
        close(difference, part(x), "what the shared experts add")
    assert difference.any()


@pytest.mark.parametrize("name, part", [("BufferExpert", "has buffers"), ("NoExpert", "has no parameters")])
def test_custom_experts_with_buffers_or_without_parameters_raise_an_error(name, part):
    with pytest.raises(ValueError, match=f"{name} {part}"):
        MoELayer(dataclasses.replace(CONFIG, expert_type=f"custom_parts.{name}"))


SEVERAL = dataclasses.replace(
    CONFIG, gate_type="linear, cosine,custom_parts.CalmGate", gate_projection_dim=3
)


@pytest.mark.parametrize("index", (0, 1, 2))
def test_a_forward_pass_uses_the_gate_with_the_given_gate_index(index):
    layer, x = MoELayer(SEVERAL, seed=1).double(), tokens(T)
    gates = [layer.gate, *layer.other_gates]
    alone = with_parts(CONFIG, gates[index], layer)
    for call in ({"gate_index": index}, {"gate_index": index, "top_k": 1}):
        options = {name: value for name, value in call.items() if name != "gate_index"}
        y, output = layer(x, **call)
        expected, expected_output = alone(x, **options)
        assert torch.equal(y, expected)
        assert torch.equal(output.balance_loss, expected_output.balance_loss)
    default = MoELayer(dataclasses.replace(SEVERAL, gate_index=index), seed=1).double()
    assert torch.equal(default(x)[0], layer(x, gate_index=index)[0])
    used = set(map(id, gates[index].parameters()))
    named = {n: p for n, p in layer.named_parameters() if "gate" in n}
    for name, grad in gradients(layer(x, gate_index=index)[0].square().sum(), named).items():
        assert bool(grad.any()) == (id(named[name]) in used), name


def test_each_gate_of_a_layer_can_have_a_different_configuration():
    configs = [
        dataclasses.replace(CONFIG, top_k=1, capacity_factor=0.5, drop_policy="bpr"),
        dataclasses.replace(CONFIG, top_k=3, score_function="sigmoid", normalize_gate="none"),
        dataclasses.replace(CONFIG, choice="experts", gate_type="cosine", gate_projection_dim=3),
    ]
    layer, x = MoELayer(CONFIG, seed=1, gate_configs=configs).double(), tokens(T)
    for index, config in enumerate(configs):
        gate = layer.gate if index == 0 else layer.other_gates[index - 1]
        alone = with_parts(config, gate, layer)
        assert torch.equal(layer(x, gate_index=index)[0], alone(x)[0])
    assert layer(x, gate_index=0)[1].routing.expert_ids_TK.shape == (T, 1)
    assert layer(x, gate_index=1)[1].routing.expert_ids_TK.shape == (T, 3)
