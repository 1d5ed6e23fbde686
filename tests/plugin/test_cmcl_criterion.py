"""Tests the loss, the log and the errors of the criterion cmcl (confident multiple choice learning)."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics

from fairseq_tutel.plugin.criterions.cmcl import CMCLCriterion
from fairseq_tutel.plugin.criterions.confident_loss import confident_loss, mean_log_probs
from fairseq_tutel.plugin.ensemble_options import CMCLConfig

PAD = 1
TASK = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))


class Given(torch.nn.Module):
    """A model that returns the input logits as the output of an ensemble."""

    def forward(self, logits):
        return mean_log_probs(logits), {"member_logits": logits}

    def get_normalized_probs(self, net_output, log_probs):
        return net_output[0]


class NoEnsemble(Given):
    """A model that is not an ensemble, and returns the logits of one member."""

    def forward(self, logits):
        return logits[0], None


def criterion(**options):
    return CMCLCriterion(TASK, CMCLConfig(**options))


def sample_of(logits, target):
    ntokens = int((target != PAD).sum())
    return {"net_input": {"logits": logits}, "target": target, "ntokens": ntokens}


def test_logged_losses_and_accuracies_equal_a_direct_computation_without_padding():
    torch.manual_seed(0)
    M, K, beta = 3, 2, 0.5
    logged, losses, rights, logs = [], [], [], []
    for length in (4, 7):
        logits = torch.randn(M, 2, length, 6)
        target = torch.randint(2, 6, (2, length))
        target[1, 2:] = PAD
        loss, size, log = criterion(cmcl_overlap=K, cmcl_beta=beta)(Given(), sample_of(logits, target))
        assert size == 2 + length
        logged.append(log)
        real = target != PAD
        losses.append(confident_loss(logits[:, real], target[real], K, beta)[0])
        torch.testing.assert_close(loss, losses[-1])
        rights.append(logits[:, real].argmax(dim=-1) == target[real])
        mean = logits[:, real].softmax(dim=-1).mean(dim=0)
        rights[-1] = torch.cat([rights[-1], (mean.argmax(dim=-1) == target[real])[None]])
        logs.append(mean.gather(1, target[real][:, None]).log())
    with metrics.aggregate() as found:
        CMCLCriterion.reduce_metrics(logged)
    values = found.get_smoothed_values()
    right = torch.cat(rights, dim=1).float()
    assert values["accuracy"] == pytest.approx(100 * float(right[M].mean()), abs=0.01)
    assert values["oracle_error"] == pytest.approx(
        100 - 100 * float(right[:M].amax(dim=0).mean()), abs=0.01
    )
    for m in range(M):
        assert values[f"member{m}_accuracy"] == pytest.approx(100 * float(right[m].mean()), abs=0.01)
    assert values["member_accuracy"] == pytest.approx(100 * float(right[:M].mean()), abs=0.01)
    nats = -float(torch.cat(logs).mean())
    assert values["ppl"] == pytest.approx(math.exp(nats), abs=0.02)
    assert values["loss"] == pytest.approx(float(sum(losses)) / 15 / math.log(2), abs=1e-3)


def test_each_call_of_the_stochastic_loss_draws_new_labels():
    sample = sample_of(torch.randn(3, 2, 4, 6), torch.randint(2, 6, (2, 4)))
    stochastic = criterion(cmcl_overlap=1, cmcl_stochastic=True)
    assert len({float(stochastic(Given(), sample)[0]) for _ in range(4)}) == 4
    assert len({float(criterion(cmcl_overlap=1)(Given(), sample)[0]) for _ in range(4)}) == 1


def test_the_criterion_cmcl_refuses_a_bad_overlap_and_a_model_that_is_not_an_ensemble():
    sample = sample_of(torch.randn(3, 2, 4, 6), torch.randint(2, 6, (2, 4)))
    with pytest.raises(ValueError, match="the model is not an ensemble; choose --arch ensemble_of"):
        criterion()(NoEnsemble(), sample)
    with pytest.raises(ValueError, match="--cmcl-overlap is 0; give a whole number, at least 1"):
        CMCLCriterion.build_criterion(SimpleNamespace(cmcl_overlap=0), TASK)
