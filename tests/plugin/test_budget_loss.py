"""The budget loss of conditional MoE routing and its gradient equal a computation in plain torch."""

import argparse

import pytest
import torch
from fairseq.logging import metrics
from normal import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.criterions.gate_loss import GateLossMixin
from fairseq_tutel.plugin.feed_forward import Context, MoEFeedForward
from fairseq_tutel.plugin.registration.flags import GateLossOptions, defaults

D, TOKENS = 5, 8
CONFIG = MoEConfig(model_dim=D, hidden_dim=6, num_experts=3, activation="gelu", cmr=True)


class Squares:
    """A criterion that sums the squares of a model's output."""

    @staticmethod
    def reduce_metrics(logs):
        metrics.log_scalar("loss", sum(log["loss"] for log in logs))

    def forward(self, model, sample):
        loss = model(sample).square().sum()
        return loss, TOKENS, {"loss": loss.detach()}


class Criterion(GateLossMixin, Squares):
    """The criterion `Squares` with the balance and budget losses of the MoE layers."""

    def __init__(self, **options):
        self.gate_loss = argparse.Namespace(**(defaults(GateLossOptions) | options))


class Model(nn.Module):
    """A model with two MoE layers, in which the last token of the second sentence is padding."""

    def __init__(self, recompute=False, **options):
        super().__init__()
        self.recompute, context = recompute, Context(True)
        config = MoEConfig(**{**vars(CONFIG), **options})
        self.layers = nn.ModuleList(
            MoEFeedForward(config, Topology(), 1, f"decoder.layers.{i}.fc1", context) for i in range(2)
        ).double()

    def forward(self, x):
        mask = torch.zeros(2, 4, dtype=torch.bool)
        mask[1, 3] = True
        for layer in self.layers:
            layer.begin_micro_batch()
            layer.begin_call(mask)
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def run(model, x, **options):
    """Return the loss, gradients and log of one micro-batch."""
    torch.manual_seed(4)
    loss, _, log = Criterion(**options).forward(model, x)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), dict(zip(dict(model.named_parameters()), grads, strict=True)), log


def mean_gate(model, x):
    """Return the mean value of the CMR gates over both layers and all tokens except padding."""
    real, gates = torch.ones(4, 2, dtype=torch.bool), []
    real[3, 1] = False
    for layer in model.layers:
        gate = layer.beside.cmr_gate
        gates.append(torch.sigmoid(x @ gate.weight[0] + gate.bias[0])[real])
        mask = ~real
        x = x + MoEFeedForward.__mro__[1].forward(layer, x, mask.t(), time_first=True)[0]
    return torch.cat(gates).mean()


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("target", (0.1, 0.9))
def test_the_budget_loss_is_the_distance_between_the_mean_gate_and_its_target(target, recompute):
    model, x = Model(recompute), normal(4, 2, D, seed=1)
    weights = {"cmr_gate_loss_wt": 0.7, "cmr_gate_loss_p": target}
    plain, plain_grads, _ = run(model, x, moe_gate_loss_wt=0.3)
    loss, grads, log = run(model, x, moe_gate_loss_wt=0.3, **weights)
    budget = (mean_gate(model, x) - target).abs()
    added = TOKENS * 0.7 * budget
    torch.testing.assert_close(loss - plain, added.detach())
    own = torch.autograd.grad(added, list(model.parameters()), allow_unused=True)
    for (name, grad), expected in zip(grads.items(), own, strict=True):
        expected = torch.zeros_like(grad) if expected is None else expected
        torch.testing.assert_close(grad - plain_grads[name], expected, rtol=1e-9, atol=1e-9, msg=name)
    with metrics.aggregate(new_root=True) as found:
        Criterion.reduce_metrics([log])
    logged = found.get_smoothed_values()
    assert logged["cmr_gate_loss"] == pytest.approx(budget.item(), abs=1e-4)
    assert logged["moe_cmr_gate"] == pytest.approx(mean_gate(model, x).item(), abs=1e-4)
    assert not model.layers[0].context.coefficients
    assert not any(torch.is_tensor(value) and value.requires_grad for value in log.values())


def test_the_target_of_the_budget_loss_has_no_effect_without_a_loss_weight():
    x = normal(4, 2, D, seed=1)
    zero, grads, log = run(Model(), x)
    again, same, _ = run(Model(), x, cmr_gate_loss_p=0.2)
    assert torch.equal(zero, again)
    assert all(torch.equal(grad, same[name]) for name, grad in grads.items())
    with metrics.aggregate(new_root=True) as found:
        Criterion.reduce_metrics([run(Model(cmr=False), x, cmr_gate_loss_wt=1.0)[2]])
    assert not [name for name in found.get_smoothed_values() if "cmr" in name]
    assert log["moe_micro_batches"] == 1


def test_the_budget_loss_of_a_micro_batch_without_tokens_has_no_gradient():
    model = Model()
    model.layers[0].context.begin_step(is_dummy=True)
    _, grads, _ = run(model, normal(4, 2, D, seed=1), cmr_gate_loss_wt=1.0)
    gates = [grad for name, grad in grads.items() if "cmr_gate" in name]
    assert len(gates) == 4 and not any(grad.any() for grad in gates)
