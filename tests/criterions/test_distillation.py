"""moe_distillation is built of the criterion that it is told, or says in one sentence why not."""

import argparse
from types import SimpleNamespace

import pytest
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_tutel.distillation.options import DistillationConfig
from fairseq_tutel.moe.options import options_in
from fairseq_tutel.plugin import register

register()


class Task:
    """A stock task, as far as a criterion looks at it; `_has_experts` where a MoE model was built."""

    def __init__(self, has_experts):
        self.args = argparse.Namespace()
        self.target_dictionary = Dictionary()
        self._has_experts = has_experts


def build(has_experts=True, **options):
    cfg = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY["moe_distillation"]())
    cfg.sentence_avg = cfg.tpu = False
    cfg.update({f"distill_{key}": value for key, value in options.items()})
    return CRITERION_REGISTRY["moe_distillation"].build_criterion(cfg, Task(has_experts))


@pytest.mark.parametrize(
    "name", ["moe_label_smoothed_cross_entropy", "moe_masked_lm", "cross_entropy"]
)
def test_it_is_the_criterion_that_is_named(name, tmp_path):
    (tmp_path / "t.pt").touch()
    criterion = build(criterion=name, teacher=str(tmp_path / "t.pt"))
    assert isinstance(criterion, CRITERION_REGISTRY[name])
    assert hasattr(criterion.task, "train_step") and not list(criterion.modules())[1:]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "needs a teacher; give --distill-teacher CHECKPOINT"),
        ({"teacher": "no.pt"}, "--distill-teacher is no.pt, which is no file"),
        ({"criterion": "ctc"}, "--distill-criterion is ctc; choose one of cross_entropy"),
        ({"alpha": 0}, "--distill-alpha is 0.0; give a finite number above 0"),
        ({"logits": "new"}, "give --distill-top-k, such as 16"),
        ({"logits": "new", "top_k": 4}, "holds no teacher's answers; give --distill-teacher"),
        ({"logits": "new", "top_k": 99}, "--distill-top-k is 99 of 4 words"),
        ({"logits": "new", "top_k": 4, "in_validation": True}, "give --distill-teacher too"),
        ({"teacher": __file__, "teacher_overrides": "5"}, "-overrides is '5'; give a dictionary"),
        ({"has_experts": False}, "the student has no experts; give cross_entropy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_can_not_be_is_one_sentence(options, sentence):
    with pytest.raises(ValueError) as error:
        build(**options)
    assert sentence in str(error.value) and str(error.value).endswith(".")


def test_every_option_has_a_flag_of_its_name():
    keys = [option.key for option in options_in(DistillationConfig)]
    cfg = SimpleNamespace(**vars(CRITERION_DATACLASS_REGISTRY["moe_distillation"]()))
    assert all(key.startswith("distill_") and hasattr(cfg, key) for key in keys)
