"""Activation checkpointing: a layer that is run again in the backward gives the same gradients.

Covered: both kinds of torch.utils.checkpoint, capacity and drops, activation dropout, autocast, the
balance loss when the recomputed function returns it.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer


def run(reentrant: bool | None, *, autocast: bool = False, **options) -> dict[str, Tensor]:
    """Return loss, y and every gradient; `reentrant` None runs without checkpointing."""
    config = MoEConfig(model_dim=6, hidden_dim=8, num_experts=4, activation="gelu", **options)
    layer = MoELayer(config, seed=1).to(torch.float32 if autocast else torch.float64)
    calls = []

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        y, output = layer(x)
        return y, output.balance_loss

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(13, 6, generator=generator, dtype=layer.gate.weight.dtype).requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if reentrant is None:
            y, balance_loss = forward(x)
        else:
            y, balance_loss = checkpoint(forward, x, use_reentrant=reentrant)
    loss = y.double().square().sum() + 3 * balance_loss
    loss.backward()
    assert len(calls) == (1 if reentrant is None else 2)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"loss": loss, "y": y, "x": x.grad, **grads}


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capacity_factor": 0.5},
        {"top_k": 1, "capacity_factor": -1.0},
        {"activation_dropout": 0.3},
        {"expert_type": "glu", "top_k": 4},
        {"autocast": True},
    ],
    ids=str,
)
def test_a_recomputed_layer_gives_the_same_bits(reentrant, options):
    plain, again = run(None, **options), run(reentrant, **options)
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("reentrant", (False, True))
def test_the_balance_loss_reaches_the_gate_through_a_recompute(reentrant):
    with_loss, without = run(reentrant), run(reentrant, balance_loss="none")
    assert not torch.allclose(with_loss["gate.weight"], without["gate.weight"])
    torch.testing.assert_close(with_loss["experts.fc1_weight"], without["experts.fc1_weight"])
