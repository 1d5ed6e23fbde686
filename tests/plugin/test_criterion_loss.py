"""MoE criterions compute fairseq's loss, with `token_loss` if the model has a plain softmax."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import FairseqDecoder, FairseqLanguageModel

from fairseq_tutel.plugin.criterions import token_loss
from fairseq_tutel.plugin.criterions.variants import (
    MoECrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterion,
)

TASK = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: 1))
PAIRS = [
    (MoECrossEntropyCriterion, CrossEntropyCriterion, ()),
    (MoELabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion, (0.1,)),
]


class Decoder(FairseqDecoder):
    """A decoder that returns its input as logits."""

    def forward(self, logits):
        return logits, None


class Tempered(FairseqLanguageModel):
    """A user's model that computes probabilities with a temperature instead of a plain softmax."""

    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return torch.log_softmax(net_output[0] / 2, dim=-1)


def losses(criterion, model, **more) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 9, generator=generator).requires_grad_()
    target = torch.randint(9, (3, 4), generator=generator)
    target[0, 2:] = 1
    loss, nll = criterion.compute_loss(model, model(logits), {"target": target}, **more)
    loss.sum().backward()
    return loss, nll, logits.grad


class Adaptive:
    """A substitute for an adaptive softmax, with the method that a decoder calls."""

    def get_log_prob(self, logits, target=None):
        return torch.log_softmax(logits * 3, dim=-1)


@pytest.fixture
def calls(monkeypatch):
    """Return a list that gets one entry per call of `token_loss`."""
    found, true = [], token_loss.token_loss
    monkeypatch.setattr(token_loss, "token_loss", lambda *args: found.append(1) or true(*args))
    return found


def same(ours, stock, options, net, **more) -> None:
    got, expected = (losses(kind(TASK, False, *options), net, **more) for kind in (ours, stock))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("model", (FairseqLanguageModel, Tempered))
@pytest.mark.parametrize("ours, stock, options", PAIRS)
def test_the_loss_equals_fairseq_s(calls, ours, stock, options, model):
    same(ours, stock, options, model(Decoder(None)))
    assert bool(calls) == (model is not Tempered)


@pytest.mark.parametrize("kind", ("an adaptive softmax", "losses by token", "an ignored prefix"))
def test_losses_that_need_a_table_use_the_code_of_fairseq(calls, kind):
    net, (ours, stock, options) = FairseqLanguageModel(Decoder(None)), PAIRS[1]
    if kind == "an adaptive softmax":
        net.decoder.adaptive_softmax = Adaptive()
    options = (*options, 1) if kind == "an ignored prefix" else options
    same(ours, stock, options, net, **({"reduce": False} if kind == "losses by token" else {}))
    assert not calls
