"""Activation checkpointing, which recomputes a layer in the backward pass, does not change gradients."""

import dataclasses

import pytest
import torch
from option_values import ROUTING, mixed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.balance import LOSSES
from fairseq_tutel.moe.config import GATE_TYPES


def run(reentrant: bool | None, *, autocast: bool = False, **options) -> dict[str, Tensor]:
    """Return the loss, the output and every gradient; `reentrant=None` turns checkpointing off."""
    config = MoEConfig(model_dim=6, hidden_dim=8, num_experts=4, activation="gelu", **options)
    layer = MoELayer(config, seed=1).to(torch.float32 if autocast else torch.float64)
    calls = []

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        y, output = layer(x, mask)
        gates = 0.0 if output.cmr_sum is None else output.cmr_sum
        return y, output.balance_loss + gates

    generator = torch.Generator().manual_seed(2)
    dtype = layer.experts.expert_parameters().popitem()[1].dtype
    x = torch.randn(3, 5, 6, generator=generator, dtype=dtype).requires_grad_()
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    if layer.balance_bias is not None:
        layer.balance_bias.bias.copy_(torch.tensor([0.5, 0, 0, -0.2]))
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if reentrant is None:
            y, balance_loss = forward(x)
        else:
            y, balance_loss = checkpoint(forward, x, use_reentrant=reentrant)
    loss = y.double().square().sum() + 3 * balance_loss
    loss.backward()
    assert len(calls) == (1 if reentrant is None else 2)
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert set(grads) == {name for name, p in layer.named_parameters() if p.requires_grad}
    return {"loss": loss, "y": y, "x": x.grad, **grads}


NOISE = {"gate_noise": 1.0, "input_jitter": 0.1, "input_dropout": 0.1}
OPTIONS = [
    # `run` checks that every parameter has a gradient, but with `gate_index` other gates have none.
    *mixed(name for name in ROUTING if name != "gate_index"),
    {},
    {"top_k": 1, "capacity_factor": -1.0},
    {"activation_dropout": 0.3},
    {"expert_type": "glu", "top_k": 4},
    {"autocast": True},
    {"autocast": True, "gate_fp32": False, "expert_bias": False, "hidden_layer_norm": True},
    {"autocast": True, "residual": True, "shared_experts": 1, "score_function": "sigmoid"},
    {"gate_type": "custom_parts.CalmGate", "expert_type": "custom_parts.DeepExpert"},
    {"expert_type": "custom_parts.DeepExpert", "activation_dropout": 0.3, "residual": True},
    {"drop_policy": "rts", "capacity_factor": 0.5, "top_k": 3, **NOISE},
    {"choice": "experts", "normalize_gate": "after", "prescore": True},
    {"prescore": True, "capacity_factor": 0.5, "activation_dropout": 0.3},
    {"shared_experts": 2, "activation_dropout": 0.3},
    {"residual": True, "shared_experts": 1, "drop_policy": "rts", "capacity_factor": 0.5},
    {"eom": 0.3, "fom": 0.2, "cmr": True, "cmr_gate_drop": 0.3, "capacity_factor": 0.5},
    {"choice": "experts", "eom": 0.3, "fom": 0.2, "autocast": True},
    {"balance_loss": "gshard_sequence:1,gshard_global:0.5,z:0.1", "score_function": "sigmoid"},
    {"balance_loss": "load_importance:1,load_importance_tutel:0.5,gshard_all:1", **NOISE},
]


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_recomputed_layer_has_bit_identical_results(reentrant, options):
    plain, again = run(None, **options), run(reentrant, **options)
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


def test_the_recomputation_test_runs_every_value_of_every_option():
    """Every new gate, drop policy, loss or switch needs a line in the option list of this file."""
    items = [item for item in dataclasses.fields(MoEConfig) if item.name != "expert_grad_norm"]
    held = {item.name: {options.get(item.name, item.default) for options in OPTIONS} for item in items}
    for item in items:
        if item.metadata["option"].of != "task":
            choices = (False, True) if item.type is bool else item.metadata["option"].choices
            assert set(choices) <= held[item.name], item.name
    assert sum(item.type is bool for item in items) > 5
    assert set(GATE_TYPES) <= held["gate_type"]
    losses = ",".join(held["balance_loss"])
    for name in LOSSES:
        assert name in losses or name in ("gshard", "switch"), name
