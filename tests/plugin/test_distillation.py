"""The criterion moe_distillation adds a distillation loss to the criterion of --distill-criterion."""

import argparse
import logging

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf
from torch import nn

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.criterions.distillation import WRAPPED
from fairseq_tutel.plugin.criterions.teacher import Teacher
from fairseq_tutel.plugin.distillation_options import DistillationConfig

register()


class Task:
    """A substitute for a task; `_has_experts` is true if the model has experts."""

    def __init__(self, has_experts):
        self.args = argparse.Namespace()
        self.target_dictionary = self.label_dictionary = Dictionary()
        self._has_experts = has_experts


def build(has_experts=True, **options):
    cfg = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY["moe_distillation"]())
    cfg.sentence_avg = cfg.tpu = False
    cfg.update({key if key in cfg else f"distill_{key}": value for key, value in options.items()})
    return CRITERION_REGISTRY["moe_distillation"].build_criterion(cfg, Task(has_experts))


@pytest.mark.parametrize("name", WRAPPED)
def test_moe_distillation_is_an_instance_of_the_named_criterion(name, tmp_path):
    torch.save({}, tmp_path / "t.pt")
    criterion = build(criterion=name, teacher=str(tmp_path / "t.pt"))
    assert isinstance(criterion, CRITERION_REGISTRY[name])
    assert hasattr(criterion.task, "train_step") and not list(criterion.modules())[1:]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"teacher": "no.pt"}, "--distill-teacher is no.pt, but"),
        ({"criterion": "ctc"}, "--distill-criterion is ctc; choose one of cross_entropy"),
        ({"alpha": 0}, "--distill-alpha is 0.0; give a finite number above 0"),
        (
            {"criterion": "sentence_prediction", "regression_target": True},
            "needs probabilities; remove --regression-target",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_distillation_option_is_refused_with_one_sentence(options, sentence):
    with pytest.raises(ValueError) as error:
        build(**options)
    assert sentence in str(error.value) and str(error.value).endswith(".")


class Student(BaseFairseqModel):
    """A model that returns the same logits for every batch."""

    def __init__(self):
        super().__init__()
        self.scores_BLV = nn.Parameter(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, src_tokens):
        return self.scores_BLV


def ready(monkeypatch, folder, prefix=0, **options):
    """Return a criterion whose teacher has only logits of 0, and arguments for the criterion's forward."""
    torch.save({}, folder / "t.pt")
    criterion = build(criterion="label_smoothed_cross_entropy", teacher=str(folder / "t.pt"), **options)
    criterion.ignore_prefix_size = prefix
    monkeypatch.setattr(Teacher, "scores", lambda *_: torch.zeros(6, 4))
    target = torch.tensor([[0, 2, 3], [0, 3, 1]])  # 1 is padding
    sample = {"net_input": {"src_tokens": target}, "target": target, "ntokens": 5}
    return criterion, (Student(), sample)


def test_tokens_of_an_ignored_prefix_are_not_distilled(monkeypatch, tmp_path):
    criterion, (model, sample) = ready(monkeypatch, tmp_path, prefix=1)
    (grad_BLV,) = torch.autograd.grad(criterion(model, sample)[0], model.parameters())
    is_trained = grad_BLV.abs().sum(-1) > 0
    assert is_trained.tolist() == [[False, True, True], [False, True, False]]


@pytest.mark.parametrize("until, taught", [(0, [0, 1, 2, 3]), (2, [0, 1])])
def test_distillation_ends_after_the_update_of_distill_until(until, taught, monkeypatch, tmp_path, caplog):
    criterion, arguments = ready(monkeypatch, tmp_path, until=until)
    found = []
    with caplog.at_level(logging.INFO):
        for update in range(4):
            criterion.begin_step(update, is_dummy=False)
            if "distill_loss" in criterion(*arguments)[2]:
                found.append(update)
    assert found == taught
    said = [record for record in caplog.records if "distillation ended" in record.getMessage()]
    assert len(said) == (until > 0)


@pytest.mark.parametrize("in_validation", (False, True))
def test_validation_uses_the_teacher_only_with_distill_in_validation(in_validation, monkeypatch, tmp_path):
    criterion, arguments = ready(monkeypatch, tmp_path, in_validation=in_validation)
    log = criterion.eval()(*arguments)[2]
    assert ("distill_loss" in log) == in_validation


def test_a_teacher_opens_in_evaluation_mode_without_the_saved_task_state(monkeypatch, tmp_path):
    """Opening a teacher must not change the state of torch's random number generator."""
    torch.save({}, tmp_path / "t.pt")
    of_file, given = {"task_state": {"a": 1}, "model": {}}, []
    monkeypatch.setattr(checkpoint_utils, "load_checkpoint_to_cpu", lambda *_: of_file)

    def load_model_ensemble(paths, task, state):
        given.append(set(state))
        torch.rand(())
        return [Student().train()], None

    monkeypatch.setattr(checkpoint_utils, "load_model_ensemble", load_model_ensemble)
    monkeypatch.setattr(Teacher, "_task_of", lambda _: None)
    options = DistillationConfig(distill_teacher=str(tmp_path / "t.pt"))
    numbers = torch.get_rng_state()
    model = Teacher(options, None)._opened(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert given == [{"model"}]
    assert not model.training and not model.scores_BLV.requires_grad


@pytest.mark.parametrize("size, calls", [(1, 0), (2, 1)])
def test_a_dummy_batch_runs_the_teacher_only_if_ranks_share_its_experts(size, calls, monkeypatch, tmp_path):
    criterion, arguments = ready(monkeypatch, tmp_path, teacher_parallel_size=size)
    found = []
    monkeypatch.setattr(Teacher, "scores", lambda *_: found.append(1) or torch.zeros(6, 4))
    criterion.begin_step(0, is_dummy=True)
    criterion(*arguments)
    assert len(found) == calls
