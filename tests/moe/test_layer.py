"""The tests compare the complete layer with loops over tokens, choices and experts."""

import dataclasses
import math
import re
from pathlib import Path

import oracle
import pytest
import torch
from compare import close, gradients, same_function
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.call import Call

CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=4, activation="gelu")
T = 11


def build(dtype: torch.dtype = torch.float64, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=5).to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, CONFIG.model_dim, seed=6, dtype=dtype).requires_grad_()


def plain_layer():
    """Return the function in docs/walk.md that computes the complete MoE layer in plain torch."""
    page = Path(__file__).parents[2] / "docs" / "walk.md"
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page.read_text(), re.S)[1], names)
    return names["mixture_of_experts"]


@pytest.mark.parametrize("factor", (0.0, 0.5))
@pytest.mark.parametrize("top_k", (1, 2, 4))
def test_the_layer_equals_the_function_in_docs_walk(top_k, factor):
    config = MoEConfig(model_dim=6, hidden_dim=5, num_experts=4, top_k=top_k, capacity_factor=factor)
    layer = MoELayer(config, seed=1).double()
    x_TD = normal(11, 6, seed=2).requires_grad_()
    names = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    tensors = layer.gate.weight, *(getattr(layer.experts, name) for name in names)
    capacity = top_k * math.ceil(factor * 11 / 4) if factor else 11 * top_k
    rows, loss = plain_layer()(x_TD, *tensors, top_k, capacity)
    y_TD, output = layer(x_TD)
    close(y_TD, torch.stack(rows), "y")
    close(output.balance_loss, loss, "balance loss")
    inputs = x_TD, *tensors
    expected = torch.autograd.grad(torch.stack(rows).square().sum() + loss, inputs)
    got = torch.autograd.grad(y_TD.square().sum() + output.balance_loss, inputs)
    for i, pair in enumerate(zip(got, expected, strict=True)):
        close(*pair, f"gradient {i}")


def check(
    layer: MoELayer, x: Tensor, top_k: int, factor: float, mask=None, call: dict | None = None
) -> None:
    call = call or {}
    real = None if mask is None else (~mask).tolist()
    named = {"x": x, **dict(layer.named_parameters())}
    same_function(
        lambda: layer(x, mask, **call)[0], lambda: oracle.mixture(layer, x, top_k, factor, real)[0], named
    )
    loss, expected = (
        layer(x, mask, **call)[1].balance_loss,
        oracle.mixture(layer, x, top_k, factor, real)[1],
    )
    close(loss, expected, "balance loss")
    expected_grads = gradients(expected, named)
    for name, grad in gradients(loss, named).items():
        close(grad, expected_grads[name], f"balance gradient of {name}")


@pytest.mark.parametrize("top_k", (1, 2, 3, 4))
@pytest.mark.parametrize("factor", (0.0, 0.5, 1.0, -0.5))
@pytest.mark.parametrize("padded", (False, True))
def test_the_layer_equals_loops_over_tokens_and_choices(top_k, factor, padded):
    mask = torch.arange(T) % 4 == 1 if padded else None
    check(build(top_k=top_k, capacity_factor=factor), tokens(T), top_k, factor, mask)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_type": "glu"},
        {"expert_bias": False},
        {"hidden_layer_norm": True},
        {"activation": "relu"},
        {"num_experts": 1, "top_k": 1},
    ],
    ids=str,
)
def test_a_layer_equals_loops_for_other_options_of_the_experts(options):
    top_k = options.get("top_k", 2)
    check(build(capacity_factor=0.5, **options), tokens(T), top_k, 0.5)


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"gate_type": "cosine", "gate_projection_dim": 3},
        {"shared_experts": 1},
        {"residual": True, "hidden_layer_norm": True},
        {"choice": "experts"},
    ),
    ids=str,
)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
def test_nan_in_padding_does_not_change_gradients(options, dtype):
    layer, x = build(dtype, balance_loss="gshard:1,z:1", **options), tokens(T, dtype=dtype)
    mask = torch.arange(T) % 3 == 0

    def run(x: Tensor) -> dict[str, Tensor]:
        y, output = layer(x, mask)
        named = {"x": x, **dict(layer.named_parameters())}
        return {"y": y, **gradients(y.square().sum() + output.balance_loss, named)}

    expected = run(x)
    for name, got in run(x.detach().masked_fill(mask[:, None], torch.nan).requires_grad_()).items():
        assert torch.equal(got, expected[name]), name


@pytest.mark.parametrize("gate_type", ("linear", "custom_parts.CalmGate"))
@pytest.mark.parametrize(
    "shape, time_first", [((3, 6), False), ((), False), ((3, 5), True), ((2, 3, 1, 5), True)]
)
def test_an_input_with_a_wrong_shape_raises_an_error(gate_type, shape, time_first):
    x = torch.ones(shape)
    with pytest.raises(ValueError, match=re.escape(f"x has shape {shape}; give [")):
        build(gate_type=gate_type)(x, time_first=time_first)


@pytest.mark.parametrize("padded", (False, True))
def test_time_first_input_gives_the_results_of_batch_first_input(padded):
    layer = build(capacity_factor=0.5)
    batch, time = 3, 5
    x_BTD = tokens(batch, time)
    mask_BT = torch.arange(time) >= torch.tensor([[5], [3], [4]]) if padded else None
    batch_first = layer(x_BTD, mask_BT)
    time_first = layer(x_BTD.transpose(0, 1), mask_BT, time_first=True)
    torch.testing.assert_close(time_first[0].transpose(0, 1), batch_first[0])
    torch.testing.assert_close(time_first[1].balance_loss, batch_first[1].balance_loss)
    assert int(batch_first[1].routing.dropped_K.sum()) > 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("factor", (0.0, 1.0))
def test_zero_tokens_give_an_empty_output_and_zero_gradients(shape, factor):
    layer, x = build(capacity_factor=factor), tokens(*shape)
    y, output = layer(x)
    assert y.shape == x.shape
    (y.sum() + output.balance_loss).backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_batch_of_padding_gives_zero_outputs_and_zero_gradients():
    layer, x = build(capacity_factor=1.0), tokens(T)
    y, output = layer(x, torch.ones(T, dtype=torch.bool))
    (y.sum() + output.balance_loss).backward()
    assert torch.equal(y, torch.zeros_like(y))
    for name, tensor in (("x", x), *layer.named_parameters()):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_the_output_has_the_dtype_and_precision_of_the_input(dtype):
    layer, x = build(dtype), tokens(T, dtype=dtype)
    y, output = layer(x)
    assert y.dtype == dtype
    assert output.balance_loss.dtype == torch.float32  # The gate computes in fp32.
    wide = build().requires_grad_(False)
    wide.load_state_dict(layer.state_dict())
    # Loops in this dtype might choose other experts, so an fp64 copy of the layer is the reference.
    same_ids = wide(x.double())[1].routing.expert_ids_TK == output.routing.expert_ids_TK
    assert same_ids.all()
    close(y, wide(x.double())[0], "output")


@pytest.mark.parametrize("gate_fp32", (True, False))
def test_autocast_uses_bf16_for_experts_and_for_a_gate_without_gate_fp32(gate_fp32):
    layer, x = build(torch.float32, gate_fp32=gate_fp32), tokens(T, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, output = layer(x)
        logits_TE = layer.gate(x)
    assert y.dtype == torch.bfloat16
    assert logits_TE.dtype == (torch.float32 if gate_fp32 else torch.bfloat16)
    exact_y = layer(x)[0]
    close(y, exact_y, "output")
    (y.float().sum() + output.balance_loss).backward()
    named = {"x": x, **dict(layer.named_parameters())}
    for name, exact in gradients(exact_y.sum() + layer(x)[1].balance_loss, named).items():
        assert named[name].grad.dtype == torch.float32
        close(named[name].grad, exact, f"gradient of {name}", 0.1)


@pytest.mark.parametrize(
    "expert_type, top_k, factor", [("ffn", 1, 0.0), ("ffn", 3, 1.0), ("glu", 2, 0.0), ("glu", 2, 0.5)]
)
def test_gradients_of_the_layer_equal_finite_differences(top_k, factor, expert_type):
    shape = {"hidden_dim": 3, "num_experts": 3}
    layer = build(top_k=top_k, capacity_factor=factor, expert_type=expert_type, **shape)
    mask = torch.tensor([False, False, True, False])
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(names, parameters, strict=True))
        y, output = torch.func.functional_call(layer, named, (x, mask))
        return y, output.balance_loss

    assert torch.autograd.gradcheck(function, (tokens(4), *layer.parameters()))


@pytest.mark.parametrize("balance_loss, weight", [("gshard:1", 1.0), ("gshard:0.25", 0.25)])
def test_the_balance_loss_is_the_weighted_sum_of_the_chosen_losses(balance_loss, weight):
    output = build(balance_loss=balance_loss)(tokens(T))[1]
    assert torch.equal(output.balance_loss, weight * output.losses["gshard"])


def test_an_earlier_routing_can_be_applied_to_other_tokens():
    layer, x, later = build(), tokens(T), tokens(T).detach().flip(0)
    experts, layer.experts = layer.experts, None  # Routing needs no experts.
    routing = layer.route(x, Call.of(x, CONFIG.model_dim))
    layer.experts = experts
    y = layer.apply_routing(later, routing)
    for t in range(T):
        assignments = zip(routing.expert_ids_TK[t].tolist(), routing.weights_TK[t], strict=True)
        expected = sum(weight * oracle.one_expert(experts, e, later[t]) for e, weight in assignments)
        close(y[t], expected, f"token {t}")
    y.square().sum().backward()
    assert x.grad.any() and layer.gate.weight.grad.any()
