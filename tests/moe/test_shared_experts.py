"""The tests compare shared experts, residual experts and the option `prescore` with loops."""

import dataclasses

import oracle
import pytest
import torch
import torch.nn.functional as F
from compare import same_function
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.shared_experts import DenseExpert
from fairseq_tutel.parallel.groups import Topology

CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=4, activation="gelu")
T = 11


def build(**options) -> MoELayer:
    layer = MoELayer(dataclasses.replace(CONFIG, **options), seed=5).double()
    for name, parameter in layer.named_parameters():
        if "layer_norm" in name:  # A layer norm's initial ones and zeros hide errors.
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    return layer


def tokens(*shape: int) -> Tensor:
    return normal(*shape, CONFIG.model_dim, seed=6).requires_grad_()


def dense_by_parts(dense: DenseExpert, x_D: Tensor, count: int) -> Tensor:
    """Compute `count` experts, each with separate rows of fc1 and columns of fc2, and add the outputs."""
    config, hidden_dim = dense.config, CONFIG.hidden_dim
    y_D = 0 * x_D if dense.fc2.bias is None else dense.fc2.bias
    parts = []
    for i in range(count):
        mine = slice(i * hidden_dim, (i + 1) * hidden_dim)

        def linear(layer, mine=mine) -> Tensor:
            return F.linear(x_D, layer.weight[mine], None if layer.bias is None else layer.bias[mine])

        hidden_H = linear(dense.fc1)
        if config.expert_type == "glu":
            hidden_H = oracle.ACTIVATIONS["swish"](hidden_H) * linear(dense.fc3)
        else:
            hidden_H = oracle.ACTIVATIONS[config.activation](hidden_H)
        parts.append((mine, hidden_H))
    if dense.hidden_layer_norm is not None:  # One layer norm covers the hidden dimensions of all experts.
        normed = dense.hidden_layer_norm(torch.cat([hidden_H for _, hidden_H in parts]))
        parts = [(mine, normed[mine]) for mine, _ in parts]
    return y_D + sum(dense.fc2.weight[:, mine] @ hidden_H for mine, hidden_H in parts)


def by_loop(layer: MoELayer, x_TD: Tensor, real: list[bool]) -> Tensor:
    config = layer.config
    routed_TD = oracle.mixture(layer, x_TD, config.top_k, config.capacity_factor, real)[0]
    y = []
    for t, x_D in enumerate(x_TD):
        y_D = routed_TD[t]
        if config.residual:
            logits = layer.beside.mix.weight @ x_D + layer.beside.mix.bias
            share = 1 / (1 + torch.exp(logits[1] - logits[0]))
            y_D = share * y_D + (1 - share) * dense_by_parts(layer.beside.dense, x_D, 1)
        if config.cmr:
            share = torch.sigmoid(layer.beside.cmr_gate.weight[0] @ x_D + layer.beside.cmr_gate.bias[0])
            y_D = share * y_D + (1 - share) * dense_by_parts(layer.beside.dense, x_D, 1)
        if config.shared_experts:
            y_D = y_D + dense_by_parts(layer.beside.shared, x_D, config.shared_experts)
        y.append(y_D if real[t] else 0 * y_D)
    return torch.stack(y)


def check(layer: MoELayer, padded: bool) -> None:
    x = tokens(T)
    mask = torch.arange(T) % 4 == 1 if padded else torch.zeros(T, dtype=torch.bool)
    same_function(
        lambda: layer(x, mask if padded else None)[0],
        lambda: by_loop(layer, x, (~mask).tolist()),
        {"x": x, **dict(layer.named_parameters())},
    )


BESIDE = (
    {"shared_experts": 1},
    {"shared_experts": 3},
    {"residual": True},
    {"shared_experts": 2, "residual": True},
    {"cmr": True},
)
FORMS = (
    {},
    {"expert_type": "glu"},
    {"expert_bias": False, "activation": "relu"},
    {"hidden_layer_norm": True, "activation": "tanh"},
    {"prescore": True, "capacity_factor": 0.5, "top_k": 3},
)


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("beside", BESIDE, ids=str)
def test_shared_and_residual_experts_equal_their_formulas(beside, form, padded):
    check(build(**beside, **form), padded)


@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.parametrize("time_first", (False, True))
def test_shared_and_residual_experts_have_zero_gradients_without_real_tokens(beside, time_first):
    layer = build(**beside)
    for shape, mask in (((0, 3), None), ((2, 3), torch.ones(2, 3, dtype=torch.bool))):
        x = tokens(*shape)
        mask = mask.t() if mask is not None and time_first else mask
        y, output = layer(x, mask, time_first=time_first)
        (y.sum() + output.balance_loss).backward()
        assert y.shape == x.shape and not y.any()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("mixed", ("residual", "cmr"))
def test_initial_shared_and_residual_experts_depend_on_the_seed_but_not_on_the_number_of_ranks(mixed):
    config = dataclasses.replace(CONFIG, shared_experts=2, **{mixed: True})
    one, other = MoELayer(config, seed=1).beside, MoELayer(config, seed=2).beside
    renamed = MoELayer(config, seed=1, name="x").beside
    topology = Topology(world_size=2, rank=1, expert_parallel_size=2)
    torch.manual_seed(99)
    split = MoELayer(config, topology, seed=1).beside
    for name, parameter in one.named_parameters():
        assert torch.equal(dict(split.named_parameters())[name], parameter), name
        for different in (other, renamed):
            assert not torch.equal(dict(different.named_parameters())[name], parameter), name
        assert not hasattr(dict(split.named_parameters())[name], "expert")  # All ranks have equal weights.
        # The bound depends on the size of one expert, even if one FFN computes several experts.
        bound = {"fc1": 5, "mix": 5, "cmr_gate": 5, "fc2": 6}
        layer = next(part for part in name.split(".") if part in bound)
        assert 0 < parameter.detach().abs().max().item() <= bound[layer] ** -0.5


@pytest.mark.parametrize("top_k", (1, 2, 4))
@pytest.mark.parametrize("factor", (0.0, 0.5))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
def test_a_layer_that_scales_expert_inputs_by_gate_weights_equals_loops(top_k, factor, padded, expert_type):
    layer, x = build(
        prescore=True, top_k=top_k, capacity_factor=factor, expert_type=expert_type
    ), tokens(T)  # fmt: skip
    real = [not padded or t % 4 != 1 for t in range(T)]
    mask = ~torch.tensor(real) if padded else None
    same_function(
        lambda: layer(x, mask)[0],
        lambda: oracle.mixture(layer, x, top_k, factor, real)[0],
        {"x": x, **dict(layer.named_parameters())},
    )
