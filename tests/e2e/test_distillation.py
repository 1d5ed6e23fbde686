"""Trains student models with distillation from a teacher, through fairseq-train."""

import shutil

import pytest
import torch
from cli import fairseq
from equality import facts_of, same_bits, same_weights
from models import dense_lm_args, lm_args

LONG = pytest.mark.long
FILE = "checkpoint_last.pt"


def loaded(folder):
    return torch.load(folder / FILE, weights_only=False)


def distill(*extra, criterion="moe_cross_entropy"):
    return ("--criterion", "moe_distillation", "--distill-criterion", criterion, *extra)


@pytest.fixture(scope="module")
def teacher(lm_data, tmp_path_factory):
    """The sharded checkpoint of a teacher, a language model with experts."""
    folder = tmp_path_factory.mktemp("teacher")
    sharded = ("--moe-checkpoint", "sharded", "--dropout", 0.1)
    fairseq("train", *lm_args(lm_data, folder, *sharded, updates=4))
    return folder / FILE


def student(data, folder, teacher, *extra, criterion="moe_cross_entropy", updates=4, **options):
    """Train a student with one layer and return the finished command."""
    asks = ("--distill-teacher", teacher) if teacher else ()
    words = distill(*asks, *extra, criterion=criterion)
    return fairseq(
        "train",
        *lm_args(data, folder, "--decoder-layers", 1, "--seed", 3, *words, updates=updates),
        **options,
    )


def test_after_distillation_ends_a_run_equals_a_run_without_a_teacher(lm_data, teacher, tmp_path):
    """After the updates of `--distill-until`, the loss is only that of `--distill-criterion`."""
    sgd = ("--optimizer", "moe_sgd", "--save-interval-updates", 1)
    run = student(lm_data, tmp_path / "whole", teacher, "--distill-until", 1, *sgd, updates=2)
    of_teacher = [record["distill_loss"] for record in run.stats("train_inner")]
    assert float(of_teacher[0]) > 0 and of_teacher[1] is None
    (first,) = (tmp_path / "whole").glob("checkpoint_*_1.pt")
    words = ("--decoder-layers", 1, "--seed", 3, *sgd, "--restore-file", shutil.copy(first, tmp_path))
    fairseq("train", *lm_args(lm_data, tmp_path / "plain", *words, updates=2))
    whole, plain = (loaded(tmp_path / name) for name in ("whole", "plain"))
    same_bits(whole["model"], plain["model"])
    assert not whole["criterion"]


SHARED = ("--distill-teacher-parallel-size", 2, "--moe-expert-parallel-size", 2)


@pytest.mark.parametrize("extra", [(), pytest.param(SHARED, marks=LONG)], ids=["each", "shared"])
def test_two_ranks_train_the_same_student_as_one_rank(lm_data, teacher, extra, tmp_path):
    """In this test, the number of validation batches is odd, so one rank gets an empty batch."""
    words = ("--optimizer", "moe_sgd", "--distill-in-validation", "--max-epoch", 1, "--batch-size", 24)
    facts = {}
    for ranks in (1, 2):
        of_ranks = [1 if word == 2 and ranks == 1 else word for word in extra]
        folder, freq = tmp_path / str(ranks), ("--update-freq", 4 // ranks)
        run = student(lm_data, folder, teacher, *words, *freq, *of_ranks, updates=99, ranks=ranks)
        facts[ranks] = loaded(folder)
        valid = run.stats("valid")
        facts[ranks]["valid"] = [float(record["valid_distill_loss"]) for record in valid]
    assert facts_of(facts[1])["distill_loss 0"] > 0 and facts[1]["valid"][0] > 0
    assert facts_of(facts[2]) == pytest.approx(facts_of(facts[1]), rel=1e-5, abs=1e-6)
    assert facts[2]["valid"] == pytest.approx(facts[1]["valid"], rel=1e-3)
    same_weights(facts[1]["model"], facts[2]["model"], adam=False)


AWAY = ("--distill-teacher-overrides", "{'moe_expert_store': 'on-demand', 'moe_expert_cache': '2'}")


@LONG
def test_a_dense_student_learns_from_a_teacher_with_offloaded_experts(lm_data, teacher, tmp_path):
    stock = (*distill(criterion="cross_entropy"), "--distill-teacher", teacher)
    losses = {}
    for name, extra in {"here": (), "away": AWAY, "bf16": ("--distill-teacher-bf16",)}.items():
        run = fairseq("train", *dense_lm_args(lm_data, tmp_path / name, *stock, *extra, updates=2))
        losses[name] = [float(record["distill_loss"]) for record in run.stats("train_inner")]
        assert bool(run.stats("expert_store")) == (name == "away")
    assert losses["away"] == losses["here"] and len(losses["here"]) == 2
    assert losses["bf16"] == pytest.approx(losses["here"], rel=0.1)
    saved = loaded(tmp_path / "here")
    assert not any("experts" in key for key in saved["model"])
    assert saved["optimizer_history"][-1]["criterion_name"] == "CrossEntropyCriterion"
