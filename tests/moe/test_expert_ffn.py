"""The experts' FFN is one autograd node; the tests compare it with separate operations."""

import dataclasses

import pytest
import torch
from compare import close
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels import reference
from fairseq_tutel.kernels.ffn_by_products import by_products
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.experts import Experts

CONFIG = MoEConfig(model_dim=6, hidden_dim=7, num_experts=4, top_k=2)
BY_PRODUCTS = by_products(vars(reference))


def run(layer: MoELayer, num_tokens: int = 11, pad: bool = False, **call) -> dict[str, Tensor]:
    """Return the layer's output, the gradient of its input and the gradients of all parameters."""
    dtype = next(layer.experts.parameters()).dtype
    x = normal(num_tokens, layer.config.model_dim, seed=2, dtype=dtype).requires_grad_()
    mask = torch.arange(num_tokens) % 3 == 1 if pad else None
    torch.manual_seed(4)
    y, output = layer(x, mask, **call)
    (y.double().square().sum() + output.balance_loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    return {"y": y.detach(), "x": x.grad, **grads}


def in_parts(monkeypatch) -> None:
    monkeypatch.setattr(Experts, "is_one_node", property(lambda _: False))


def build(dtype: torch.dtype = torch.float64, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=1).to(dtype)


def check(monkeypatch, layer: MoELayer, num_tokens: int = 11, **more) -> None:
    """Compare two versions of the FFN's autograd node with separate dispatch, FFN and combine."""
    assert layer.experts.is_one_node
    one_node = run(layer, num_tokens, **more)
    with monkeypatch.context() as patch:
        patch.setattr("fairseq_tutel.kernels.ops", lambda *_: BY_PRODUCTS)
        by_products = run(layer, num_tokens, **more)
        in_parts(patch)
        parts = run(layer, num_tokens, **more)
    for name, expected in parts.items():
        close(one_node[name], expected, f"{name}, expert by expert")
        close(by_products[name], expected, f"{name}, product by product")


@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
@pytest.mark.parametrize("expert_bias", (True, False))
@pytest.mark.parametrize("top_k", (1, 2, 3, 4))
def test_the_ffn_node_equals_separate_operations_for_every_expert_type(
    monkeypatch, expert_type, expert_bias, top_k
):
    options = {"expert_type": expert_type, "expert_bias": expert_bias, "top_k": top_k}
    check(monkeypatch, build(**options, activation="gelu"), pad=True)


@pytest.mark.parametrize("recompute_experts", (True, False))
def test_the_ffn_node_under_autocast_equals_separate_operations_in_bf16(monkeypatch, recompute_experts):
    layer = build(torch.float32, recompute_experts=recompute_experts)
    with torch.autocast("cpu", torch.bfloat16):
        one_node = run(layer)
        in_parts(monkeypatch)
        parts = run(layer)
    assert one_node["y"].dtype == parts["y"].dtype == torch.bfloat16
    for name, expected in parts.items():
        assert one_node[name].dtype == expected.dtype, name
        close(one_node[name], expected, name, 0.05)


@pytest.mark.parametrize("expert_type, recompute_experts", [("ffn", False), ("glu", True)])
def test_gradients_of_the_ffn_node_equal_finite_differences(expert_type, recompute_experts):
    options = {"expert_type": expert_type, "recompute_experts": recompute_experts}
    layer = build(**options, activation="gelu", capacity_factor=0.5)
    names = list(dict(layer.named_parameters()))
    x = normal(5, 6, seed=5).requires_grad_()

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,))[0]

    inputs = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(forward, (x, *inputs))


def test_rows_that_belong_to_no_expert_give_zeros_and_get_no_gradient():
    experts = build().experts
    rows = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    groups = Groups.of_tensor(torch.tensor([3, 0, 2, 1]))
    out = experts(rows, groups)
    assert torch.equal(out[6:], torch.zeros(3, 6))
    close(out[:6], experts(rows[:6], groups), "rows of experts")
    out.sum().backward()
    assert torch.equal(rows.grad[6:], torch.zeros(3, 6))
    assert rows.grad[:6].abs().sum() > 0


def kept_bytes(layer: MoELayer, x: Tensor) -> int:
    """Return the bytes that a forward pass saves for backward, without the input and the parameters."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    for tensor in (x, *layer.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("expert_type, hidden", [("ffn", 1), ("glu", 2)])
@pytest.mark.parametrize("top_k, hidden_dim", [(1, 512), (2, 256), (8, 64)])
def test_forward_saves_only_the_routing_and_the_hidden_rows(expert_type, hidden, top_k, hidden_dim):
    """Hidden rows take K * H values per token (GLU: 2 * K * H), and recomputation saves no hidden rows."""
    tokens, experts = 200, 8
    routing = tokens * (experts * 4 + top_k * 50) + 8 * tokens * top_k  # bytes of maps and weights
    x = torch.randn(tokens, 32, requires_grad=True)
    config = MoEConfig(32, hidden_dim, experts, top_k=top_k, expert_type=expert_type, activation="gelu")
    kept = kept_bytes(MoELayer(config, seed=1), x)
    hidden_bytes = hidden * tokens * top_k * hidden_dim * 4
    assert hidden_bytes <= kept <= hidden_bytes + routing
    again = dataclasses.replace(config, recompute_experts=True)
    assert kept_bytes(MoELayer(again, seed=1), x) <= routing


def test_a_forward_pass_without_gradients_saves_no_tensor(monkeypatch):
    seen = []
    forward = reference.ffn_forward
    monkeypatch.setattr(
        reference, "ffn_forward", lambda *args, keep: seen.append(keep) or forward(*args, keep=keep)
    )
    layer = build()
    with torch.no_grad():
        layer(torch.ones(3, 6, dtype=torch.float64))
    layer(torch.ones(3, 6, dtype=torch.float64))
    assert seen == [False, True]


@pytest.mark.parametrize("products", (False, True))
@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
def test_frozen_experts_get_no_gradients_but_their_inputs_do(monkeypatch, expert_type, products):
    layer = build(expert_type=expert_type)
    expected = run(layer)
    layer.experts.requires_grad_(False)
    made = []
    if products:
        others = {**vars(reference), "grouped_weight_grad": lambda *_, **__: made.append(1)}
        monkeypatch.setattr("fairseq_tutel.kernels.ops", lambda *_: by_products(others))
    found = run(layer)
    assert found["experts.fc1_weight"] is None and not made
    for name in ("y", "x", "gate.weight"):
        close(found[name], expected[name], name)
